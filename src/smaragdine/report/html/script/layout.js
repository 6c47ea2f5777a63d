// Boxes of one level: what is linked by dataflow in layers from left to right, the others in a grid below.

const BOX = { height: 62, least: 130, most: 190, gap: 28, row: 14, line: 34 };

// `ids` by falling energy. Gives each its place, and each edge its path.
function layOut(ids, edges, width) {
  const known = new Set(ids);
  const flow = acyclic(
    ids,
    edges.filter(([source, target]) => source !== target && known.has(source) && known.has(target)),
  );
  const linked = new Set(flow.flatMap(([source, target]) => [source, target]));
  const layers = layered(
    ids.filter((id) => linked.has(id)),
    flow,
  );
  const columns = Math.max(1, Math.floor((width + BOX.gap) / (BOX.least + BOX.gap)));
  // As many lines as it takes, each of much the same length.
  const lines = Math.ceil(layers.length / columns) || 0;
  const perLine = lines ? Math.ceil(layers.length / lines) : columns;
  const loose = ids.filter((id) => !linked.has(id));
  const widest = lines ? perLine : Math.min(columns, Math.max(loose.length, 1));
  const boxWidth = Math.min(BOX.most, (width + BOX.gap) / widest - BOX.gap, width);
  const places = new Map();
  let y = 0;
  for (let line = 0; line < lines; line++) {
    const inLine = layers.slice(line * perLine, (line + 1) * perLine);
    const column = new Map(inLine.flatMap((layer, i) => layer.map((id) => [id, i])));
    const skips = flow.some(([source, target]) => column.get(target) - column.get(source) > 1);
    const tallest = Math.max(...inLine.map((layer) => layer.length));
    const height = tallest * (BOX.height + BOX.row) - BOX.row;
    y += skips ? 22 : 0;
    inLine.forEach((layer, i) => {
      const used = layer.length * (BOX.height + BOX.row) - BOX.row;
      layer.forEach((id, j) =>
        places.set(id, {
          x: i * (boxWidth + BOX.gap),
          y: y + (height - used) / 2 + j * (BOX.height + BOX.row),
          line,
          column: i,
        }),
      );
    });
    y += height + BOX.line;
  }
  const paths = flow.map(([source, target, count]) => ({
    source,
    target,
    count,
    d: curve(places.get(source), places.get(target), boxWidth),
  }));
  const gap = BOX.row;
  const perRow = Math.max(1, Math.floor((width + gap) / (boxWidth + gap)));
  loose.forEach((id, i) =>
    places.set(id, {
      x: (i % perRow) * (boxWidth + gap),
      y: y + Math.floor(i / perRow) * (BOX.height + gap),
    }),
  );
  const height = Math.max(0, ...[...places.values()].map((place) => place.y + BOX.height));
  return { places, paths, boxWidth, height };
}

// Edges that would go round in a circle are turned away.
function acyclic(ids, edges) {
  const after = new Map(ids.map((id) => [id, []]));
  for (const edge of edges) after.get(edge[0]).push(edge);
  const seen = new Map();
  const kept = [];
  for (const start of [...ids].sort((a, b) => a - b)) {
    if (seen.has(start)) continue;
    const stack = [[start, 0]];
    seen.set(start, "open");
    while (stack.length) {
      const top = stack[stack.length - 1];
      const edge = after.get(top[0])[top[1]++];
      if (!edge) {
        seen.set(top[0], "done");
        stack.pop();
      } else if (seen.get(edge[1]) !== "open") {
        kept.push(edge);
        if (!seen.has(edge[1])) {
          seen.set(edge[1], "open");
          stack.push([edge[1], 0]);
        }
      }
    }
  }
  return kept;
}

// Each as far right as its longest way from the left; within a layer near what it is linked to.
function layered(ids, edges) {
  const inputs = new Map(ids.map((id) => [id, 0]));
  const [before, after] = [new Map(ids.map((id) => [id, []])), new Map(ids.map((id) => [id, []]))];
  for (const [source, target] of edges) {
    inputs.set(target, inputs.get(target) + 1);
    before.get(target).push(source);
    after.get(source).push(target);
  }
  const layer = new Map();
  let ready = ids.filter((id) => !inputs.get(id));
  for (let depth = 0; ready.length; depth++) {
    const next = [];
    for (const id of ready) {
      layer.set(id, depth);
      for (const target of after.get(id)) {
        inputs.set(target, inputs.get(target) - 1);
        if (!inputs.get(target)) next.push(target);
      }
    }
    ready = next;
  }
  const layers = [];
  for (const id of ids) (layers[layer.get(id)] = layers[layer.get(id)] || []).push(id);
  const place = new Map();
  const number = () =>
    layers.forEach((members) => members.forEach((id, i) => place.set(id, i - (members.length - 1) / 2)));
  number();
  for (let round = 0; round < 6; round++) {
    const near = round % 2 ? after : before;
    const centre = (id) =>
      near.get(id).length
        ? near.get(id).reduce((sum, other) => sum + place.get(other), 0) / near.get(id).length
        : place.get(id);
    for (const members of layers) {
      const centres = new Map(members.map((id) => [id, centre(id)]));
      members.sort((a, b) => centres.get(a) - centres.get(b));
    }
    number();
  }
  return layers;
}

function curve(from, to, width) {
  const [x1, y1, x2, y2] = [from.x + width, from.y + BOX.height / 2, to.x - 5, to.y + BOX.height / 2];
  if (from.line !== to.line) {
    // Around the end of the line and back to the beginning of the other, as one reads.
    const middle = to.y - BOX.line / 2;
    const [right, left, r] = [x1 + 12, to.x - 14, 8];
    return `M${x1} ${y1} H${right - r} Q${right} ${y1} ${right} ${y1 + r} V${middle - r} Q${right} ${middle} ${right - r} ${middle} H${left + r} Q${left} ${middle} ${left} ${middle + r} V${y2 - r} Q${left} ${y2} ${left + r} ${y2} H${x2}`;
  }
  if (to.column - from.column > 1) {
    const top = Math.min(from.y, to.y) - 20;
    return `M${from.x + width * 0.75} ${from.y} C${from.x + width} ${top} ${to.x} ${top} ${to.x + width * 0.25} ${to.y - 5}`;
  }
  const bend = Math.max(12, (x2 - x1) / 2);
  return `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}
