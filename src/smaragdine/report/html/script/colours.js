// One hue from pale to deep, even to the eye (OKLCH), for how much; a hue each for more,
// less, new and gone.

const HUES = { much: 166, more: 55, less: 255, new: 345, gone: 300 };

function rgb(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((value) => Math.min(1, Math.max(0, value)));
}

function css(linear) {
  const bytes = linear.map((v) =>
    Math.round(255 * (v <= 0.0031308 ? 12.92 * v : 1.055 * v ** (1 / 2.4) - 0.055)),
  );
  return `rgb(${bytes.join(", ")})`;
}

function ramp(hue, dark) {
  return Array.from({ length: 65 }, (_, i) => {
    const t = i / 64;
    const linear = dark
      ? rgb(0.27 + 0.5 * t, 0.012 + 0.115 * t, hue)
      : rgb(0.975 - 0.47 * t, 0.006 + 0.115 * t, hue);
    const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    return {
      fill: css(linear),
      ink: 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.062 ? "#fff" : "#101815",
    };
  });
}

const ramps = {};

// `t` from 0 to 1.
function colour(t, hue = "much", dark = isDark()) {
  const key = `${hue}${dark}`;
  ramps[key] = ramps[key] || ramp(HUES[hue], dark);
  return ramps[key][Math.round(64 * Math.min(1, Math.max(0, t || 0)))];
}

const printing = matchMedia("print");
const darkly = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return !printing.matches && (chosen ? chosen === "dark" : darkly.matches);
}

// A small share must still be seen, and twice the share must still look like more.
const intensity = (share) => Math.sqrt(Math.max(0, share || 0));
