// Power over time, one band per device: the line is its mean, the band its lowest and highest per pixel.

const BAND = { height: 74, strip: 9, gap: 16, left: 54, right: 10, axis: 24 };
const span = { from: 0, to: 0, end: 0 };
let bands = [];
let cursor = null; // ns
let dragged = null;

function makeBands(report) {
  const letters = report.runs.length > 1;
  bands = report.runs.flatMap((run, i) =>
    Object.entries(run.data.power).map(([device, power]) => ({
      run,
      device,
      power,
      number: i,
      name: letters ? `${"AB"[i]} ${device}` : device,
      layers: (run.data.layers || {})[device] || null,
      highest: power.high_w.reduce((a, b) => Math.max(a, b), 0),
    })),
  );
  span.end = Math.max(0, ...report.runs.map((run) => run.data.figures.duration_s * 1e9));
  Object.assign(span, { from: 0, to: span.end });
}

function drawPower(view, node, report) {
  at("time").hidden = false;
  const canvas = at("power");
  if (!bands.length) {
    canvas.hidden = at("ranges").hidden = true;
    at("power-note").textContent = "No power: no device has a reading in this recording.";
    return;
  }
  const width = widthOf(canvas);
  const height = bands.length * (BAND.height + BAND.strip + BAND.gap) + BAND.axis;
  const pen = sharp(canvas, width, height);
  const x = (ns) => BAND.left + ((ns - span.from) / (span.to - span.from)) * (width - BAND.left - BAND.right);
  const ink = Object.fromEntries(
    ["dim", "line", "ink", "accent", "band", "window"].map((name) => [name, token(name)]),
  );
  bands.forEach((band, i) =>
    drawBand(pen, band, i * (BAND.height + BAND.strip + BAND.gap) + 12, x, width, ink, inView(view, node)),
  );
  drawAxis(pen, height - BAND.axis + 4, x, width, ink);
  if (cursor !== null && cursor >= span.from && cursor <= span.to)
    line(pen, x(cursor), 6, x(cursor), height - BAND.axis, ink.dim);
  if (dragged) {
    pen.fillStyle = ink.window;
    pen.fillRect(x(dragged[0]), 6, x(dragged[1]) - x(dragged[0]), height - BAND.axis);
  }
  canvas.setAttribute(
    "aria-label",
    `Power of ${bands.map((band) => band.name).join(", ")} from ${seconds(span.from / 1e9)} to ${seconds(span.to / 1e9)}`,
  );
  at("power-note").textContent = powerNote(view, node);
  drawRanges(report);
}

function powerNote(view, node) {
  const traced = bands.some((band) => band.layers);
  const strip =
    traced && view && view.kind === "run"
      ? `; strip below: ${node ? `when ${view.tree.called(node)} ran` : "when operations ran"}`
      : "";
  const left = bands.reduce((sum, band) => sum + (band.layers ? band.layers.left_out : 0), 0);
  return `line: mean, band: lowest and highest${bands.some((band) => band.run.data.windows.length) ? "; shaded: traced" : ""}${strip}${left ? " (only the first part of it)" : ""}${printing.matches ? "" : ". Drag to zoom in, double click to zoom out"}.`;
}

function drawRanges(report) {
  const ranges = [["whole run", 0, span.end]];
  report.runs.forEach((run, i) =>
    run.data.windows.slice(0, 5).forEach((window, j) => {
      const which = report.runs.length > 1 ? `${"AB"[i]}: ` : "";
      const margin = (window.end_ns - window.begin_ns) * 0.03;
      ranges.push([
        `${which}traced${run.data.windows.length > 1 ? ` ${j + 1}` : ""}`,
        Math.max(0, window.begin_ns - margin),
        Math.min(span.end, window.end_ns + margin),
      ]);
      if (window.steps > 1)
        ranges.push([
          `${which}one step${run.data.windows.length > 1 ? ` of ${j + 1}` : ""}`,
          window.begin_ns,
          window.begin_ns + (window.end_ns - window.begin_ns) / window.steps,
        ]);
    }),
  );
  at("ranges").replaceChildren(
    ...ranges.map(([name, from, to]) =>
      element(
        "button",
        {
          type: "button",
          "aria-pressed": String(from === span.from && to === span.to),
          on: { click: () => showSpan(from, to) },
        },
        name,
      ),
    ),
  );
}

let redrawPower = () => {};

function showSpan(from, to) {
  const least = 20_000; // ns
  const length = Math.max(least, Math.min(span.end, to - from));
  span.from = Math.max(0, Math.min(from, span.end - length));
  span.to = span.from + length;
  redrawPower();
}

function powerAt(band, ns) {
  const i = firstAfter(band.power.start_ns, ns) - 1;
  return i >= 0 && ns < band.power.end_ns[i] ? band.power.mean_w[i] : NaN;
}

function layerAt(band, ns) {
  if (!band.layers) return null;
  const i = firstAfter(band.layers.start_ns, ns) - 1;
  if (i < 0 || ns >= band.layers.start_ns[i] + band.layers.length_ns[i]) return null;
  const phase = band.layers.phases[band.layers.phase[i]];
  return `${shortened(visible(band.run.tree.path(band.layers.node[i])), 90)}${phase ? `, ${phase}` : ""}`;
}

function powerLines(ns) {
  return bands.flatMap((band) => {
    const layer = layerAt(band, ns);
    return [[band.name, watts(powerAt(band, ns))], ...(layer ? [["ran", layer]] : [])];
  });
}

function epochAt(ns) {
  const { start_ns, end_ns, index } = bands[0].run.data.epochs;
  const i = firstAfter(start_ns, ns) - 1;
  return i >= 0 && ns < end_ns[i] ? `, epoch ${index[i] ?? "?"}` : "";
}

function listenPower(redraw) {
  redrawPower = redraw;
  const canvas = at("power");
  const when = (event) => {
    const { left, width } = canvas.getBoundingClientRect();
    const part = (event.clientX - left - BAND.left) / (width - BAND.left - BAND.right);
    return span.from + Math.max(0, Math.min(1, part)) * (span.to - span.from);
  };
  const tell = (x, y) => {
    const lines = powerLines(cursor);
    const decimals = span.to - span.from < 1e9 ? 6 : 3;
    showTip(x, y, `${(cursor / 1e9).toFixed(decimals)} s${epochAt(cursor)}`, lines);
    canvas.dataset.cursorNs = cursor;
    at("said").textContent = lines.map((each) => each.join(" ")).join("; ");
  };
  canvas.addEventListener("pointermove", (event) => {
    cursor = when(event);
    if (dragged) dragged[1] = cursor;
    redraw();
    tell(event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerdown", (event) => {
    dragged = [when(event), when(event)];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => {
    const [from, to] = (dragged || [0, 0]).slice().sort((a, b) => a - b);
    dragged = null;
    if (to - from > (span.to - span.from) / 200) showSpan(from, to);
    else redraw();
  });
  canvas.addEventListener("pointerleave", () => {
    cursor = null;
    hideTip();
    redraw();
  });
  canvas.addEventListener("dblclick", () => showSpan(0, span.end));
  canvas.addEventListener("keydown", (event) => {
    const length = span.to - span.from;
    const middle = cursor === null ? span.from + length / 2 : cursor;
    const act = {
      ArrowLeft: () => (cursor = Math.max(0, middle - length / 100)),
      ArrowRight: () => (cursor = Math.min(span.end, middle + length / 100)),
      "+": () => showSpan(middle - length / 4, middle + length / 4),
      "-": () => showSpan(middle - length, middle + length),
      0: () => showSpan(0, span.end),
    }[event.key];
    if (!act) return;
    act();
    event.preventDefault();
    if (cursor !== null && (cursor < span.from || cursor > span.to))
      showSpan(cursor - length / 2, cursor + length / 2);
    redraw();
    if (cursor !== null) {
      const { left, top, width } = canvas.getBoundingClientRect();
      tell(
        left + BAND.left + ((cursor - span.from) / (span.to - span.from)) * (width - BAND.left - BAND.right),
        top,
      );
    }
  });
  canvas.addEventListener("blur", hideTip);
}
