// Quantities as a person reads them: what units.py does for the terminal.

const PREFIXES = [
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
  [1, ""],
  [1e-3, "m"],
  [1e-6, "µ"],
  [1e-9, "n"],
  [1e-12, "p"],
];
const NONE = "–";

const absent = (value) => value === null || value === undefined || Number.isNaN(value);

function si(value, unit, digits = 3) {
  if (absent(value)) return NONE;
  if (value === 0) return `0 ${unit}`;
  const rounded = Number(value.toExponential(digits - 1));
  const found = PREFIXES.find(([scale]) => Math.abs(rounded) >= scale);
  if (!found) return `${rounded.toExponential(digits - 1)} ${unit}`;
  const scaled = rounded / found[0];
  const whole = String(Math.trunc(Math.abs(scaled))).length;
  return `${minus(scaled.toFixed(Math.max(0, digits - whole)))} ${found[1]}${unit}`;
}

const minus = (text) => text.replace(/^-/, "−");
const joules = (value) => si(value, "J");
const watts = (value) => si(value, "W");

function seconds(value) {
  if (absent(value) || Math.abs(value) < 120) return si(value, "s");
  const all = Math.round(Math.abs(value));
  const [hours, minutes, left] = [Math.floor(all / 3600), Math.floor(all / 60) % 60, all % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(left)}` : `${minutes}:${two(left)} min`;
}

// One prefix for both, and digits only as far as the uncertainty goes.
function plusMinus(value, width, unit) {
  if (absent(width) || absent(value)) return si(value, unit);
  if (!(width > 0)) return `${si(value, unit)} ± 0`;
  const prefixed = si(Math.max(Math.abs(value), width), unit).split(" ")[1];
  const found = PREFIXES.find(([, prefix]) => prefix + unit === prefixed);
  if (!found) return `${si(value, unit, 2)} ± ${si(width, unit, 1)}`;
  const [scale] = found;
  const digits = "12".includes(width.toExponential()[0]) ? 2 : 1;
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(width / scale)));
  return `${minus((value / scale).toFixed(decimals))} ± ${(width / scale).toFixed(decimals)} ${prefixed}`;
}

const energyText = (value, width) => plusMinus(value, width, "J");

// Uncertain to a fifth, 23.4 % says no more than 23 %.
function percent(share, relative = 0) {
  if (absent(share)) return NONE;
  const value = share * 100;
  if (value > 0 && value < 0.05) return "< 0.1 %";
  return `${minus(value.toFixed(Math.abs(value) < 99.95 && !(relative * Math.abs(value) > 1) ? 1 : 0))} %`;
}

const signed = (text) => (text.startsWith("−") || text === NONE || text.startsWith("0 ") ? text : `+${text}`);

function countText(value) {
  if (absent(value)) return NONE;
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
}

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

function dateText(ms) {
  return `${new Date(ms).toISOString().slice(0, 19).replace("T", " ")} UTC`;
}
