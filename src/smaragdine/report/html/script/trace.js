// How power over time is drawn: bands, epochs, the trace, the strip of layers below it, the axis.

// Whether a layer of the plain tree is inside the one shown, merged or not.
function inView(view, node) {
  if (!view || view.kind !== "run") return () => true;
  const to = view.tree === view.run.merged ? view.run.data.merged.of_node : null;
  return (each, run) => run === view.run && view.tree.inside(to ? to[each] : each, node);
}

const line = (pen, x1, y1, x2, y2, style) => {
  pen.strokeStyle = style;
  pen.beginPath();
  pen.moveTo(Math.round(x1) + 0.5, y1);
  pen.lineTo(Math.round(x2) + 0.5, y2);
  pen.stroke();
};

function drawBand(pen, band, top, x, width, ink, inside) {
  const right = width - BAND.right;
  const highest = niceAbove(band.highest);
  const y = (watt) => top + BAND.height - (watt / highest) * BAND.height;
  const clip = (ns) => Math.max(BAND.left, Math.min(right, x(ns)));
  const { data } = band.run;
  pen.lineWidth = 1;
  for (const window of data.windows) {
    pen.fillStyle = ink.window;
    const [from, to] = [clip(window.begin_ns), clip(window.end_ns)];
    if (to > BAND.left && from < right) pen.fillRect(from, top, Math.max(1, to - from), BAND.height);
  }
  for (const watt of [0, highest / 2, highest]) {
    pen.strokeStyle = ink.line;
    pen.beginPath();
    pen.moveTo(BAND.left, Math.round(y(watt)) + 0.5);
    pen.lineTo(right, Math.round(y(watt)) + 0.5);
    pen.stroke();
    pen.fillStyle = ink.dim;
    pen.textAlign = "right";
    pen.fillText(watt ? si(watt, "W", 2) : "0", BAND.left - 6, y(watt));
  }
  drawEpochs(pen, band, top, x, right, ink);
  drawTrace(pen, band.power, x, y, right, ink);
  drawStrip(pen, band, top + BAND.height + 2, x, right, ink, inside);
  pen.textAlign = "left";
  pen.fillStyle = ink.ink;
  pen.fillText(band.name, BAND.left + 5, top - 5);
}

// Their names stand above the band, beside the device's, as far as there is room.
function drawEpochs(pen, band, top, x, right, ink) {
  const { epochs } = band.run.data;
  let last = -Infinity;
  let free = BAND.left + 5 + pen.measureText(band.name).width + 10;
  pen.fillStyle = ink.dim;
  pen.textAlign = "left";
  for (let i = 0; i < epochs.start_ns.length; i++) {
    const from = x(epochs.start_ns[i]);
    if (from < BAND.left || from > right || from - last < 3) continue;
    pen.setLineDash([2, 3]);
    line(pen, from, top, from, top + BAND.height, ink.dim);
    pen.setLineDash([]);
    last = from;
    const name = `epoch ${epochs.index[i] ?? "?"}`;
    const to = from + pen.measureText(name).width;
    if (from < free || to > right + BAND.right) continue;
    pen.fillText(name, from, top - 5);
    free = to + 10;
  }
}

// Per pixel column the lowest, the highest and the mean of all that lies in it.
function drawTrace(pen, power, x, y, right, ink) {
  const { start_ns, end_ns, low_w, high_w, mean_w } = power;
  const columns = right - BAND.left;
  const perNs = columns / (span.to - span.from);
  const low = new Float32Array(columns + 1).fill(Infinity);
  const high = new Float32Array(columns + 1).fill(-Infinity);
  const [sum, time] = [new Float64Array(columns + 1), new Float64Array(columns + 1)];
  for (let i = firstAfter(end_ns, span.from); i < start_ns.length && start_ns[i] < span.to; i++) {
    const [from, to] = [
      Math.max(0, (start_ns[i] - span.from) * perNs),
      Math.min(columns, (end_ns[i] - span.from) * perNs),
    ];
    for (let column = Math.floor(from); column <= to; column++) {
      const part = Math.min(column + 1, to) - Math.max(column, from);
      if (part <= 0) continue;
      low[column] = Math.min(low[column], low_w[i]);
      high[column] = Math.max(high[column], high_w[i]);
      sum[column] += mean_w[i] * part;
      time[column] += part;
    }
  }
  pen.fillStyle = ink.band;
  for (let column = 0; column <= columns; column++) {
    if (time[column] > 0)
      pen.fillRect(BAND.left + column, y(high[column]), 1, Math.max(1, y(low[column]) - y(high[column])));
  }
  pen.strokeStyle = ink.accent;
  pen.lineWidth = 1.25;
  pen.beginPath();
  let drawing = false;
  for (let column = 0; column <= columns; column++) {
    const known = time[column] > 0;
    const point = [BAND.left + column + 0.5, known ? y(sum[column] / time[column]) : 0];
    if (known) pen[drawing ? "lineTo" : "moveTo"](...point);
    drawing = known;
  }
  pen.stroke();
  pen.lineWidth = 1;
}

function drawStrip(pen, band, top, x, right, ink, inside) {
  if (!band.layers) return;
  const { start_ns, length_ns, node } = band.layers;
  for (const chosen of [false, true]) {
    pen.fillStyle = chosen ? ink.accent : ink.line;
    let drawnTo = -Infinity;
    for (
      let i = Math.max(0, firstAfter(start_ns, span.from) - 1);
      i < start_ns.length && start_ns[i] < span.to;
      i++
    ) {
      if (inside(node[i], band.run) !== chosen) continue;
      const from = Math.max(BAND.left, x(start_ns[i]));
      const to = Math.min(right, Math.max(x(start_ns[i] + length_ns[i]), from + 0.7));
      if (to <= drawnTo || to < BAND.left) continue;
      pen.fillRect(from, top, to - from, BAND.strip - 2);
      drawnTo = to;
    }
  }
}

// Where the first value above `limit` stands in a rising array.
function firstAfter(values, limit) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

function niceAbove(value) {
  if (!(value > 0)) return 1;
  const scale = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].find((step) => step * scale >= value) * scale;
}

function drawAxis(pen, top, x, width, ink) {
  const wanted = Math.max(2, Math.floor((width - BAND.left) / 80));
  const raw = (span.to - span.from) / 1e9 / wanted;
  const scale = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((each) => each * scale >= raw) * scale;
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  pen.fillStyle = ink.dim;
  pen.textAlign = "center";
  for (let i = Math.ceil(span.from / 1e9 / step); i * step <= span.to / 1e9; i++) {
    line(pen, x(i * step * 1e9), top - 8, x(i * step * 1e9), top - 4, ink.dim);
    pen.fillText(`${(i * step).toFixed(decimals)} s`, Math.min(width - 24, x(i * step * 1e9)), top + 5);
  }
}
