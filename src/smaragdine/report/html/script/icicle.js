// The whole tree at once: each layer as wide as its energy, below the one it is in. Only what is a pixel wide.

const ICICLE = { row: 23, most: 14 };
let cells = []; // what was drawn, for the pointer: [x, y, width, node]

function drawIcicle(view, node) {
  const canvas = at("icicle");
  const width = widthOf(canvas);
  const { tree } = view;
  const weight = view.weight(state.metric);
  const above = [0, ...tree.above(node)].filter((each, i, all) => all.indexOf(each) === i);
  let deepest = 0;
  for (let i = node; i < node + tree.size[node]; i++) deepest = Math.max(deepest, tree.depth[i]);
  const rows = Math.min(ICICLE.most, above.length + deepest - tree.depth[node]);
  const pen = sharp(canvas, width, rows * ICICLE.row);
  const powers = state.metric === "power" ? (n) => view.figures(n).power_w : null;
  const range = powers ? powerRange(view) : null;
  cells = [];
  const paint = (n, x, w, row) => {
    if (row >= rows) return;
    const look =
      row < above.length - 1
        ? { fill: token("panel"), ink: token("dim") }
        : view.kind === "changes"
          ? changeLook(view.figures(n), view.figures(node))
          : colour(powers ? within(powers(n), range) : intensity(weight[n] / weight[node]));
    pen.fillStyle = look.fill;
    pen.fillRect(x, row * ICICLE.row, Math.max(1, w - 1), ICICLE.row - 1);
    cells.push([x, row, w, n]);
    label(pen, tree.called(n), x, w, row, look.ink);
  };
  above.forEach((each, row) => paint(each, 0, width, row));
  // In the order of the dataflow where it is known; what is narrower than a pixel is not visited.
  const waiting = [[node, 0, width, above.length]];
  while (waiting.length) {
    const [n, x, w, row] = waiting.pop();
    if (!(weight[n] > 0) || row >= rows) continue;
    let left = x;
    for (const child of tree.children(n)) {
      const share = (weight[child] / weight[n]) * w;
      if (share >= 1) {
        paint(child, left, share, row);
        waiting.push([child, left, share, row + 1]);
      }
      left += share;
    }
  }
  canvas.setAttribute(
    "aria-label",
    `Icicle of ${tree.called(node)}: ${plural(cells.length, "cell")}. The table has the same figures.`,
  );
  canvas.dataset.cells = cells.length;
  at("icicle-note").textContent =
    view.kind === "changes"
      ? "width: energy of A and B; colour: what changed"
      : `width: ${state.metric === "time" ? "busy time" : "energy"}${powers ? "; colour: power while busy" : ""}; click to zoom`;
}

function label(pen, text, x, w, row, ink) {
  if (w < 18) return;
  let shown = text.slice(0, 200);
  for (
    let letters = shown.length;
    pen.measureText(shown).width > w - 8;
    shown = `${text.slice(0, --letters)}…`
  )
    if (letters < 4) return;
  pen.fillStyle = ink;
  pen.fillText(shown, x + 5, row * ICICLE.row + ICICLE.row / 2);
}

// Of all that is large enough to be seen.
function powerRange(view) {
  const weight = view.weight("energy");
  const seen = (node) => weight[node] > FOLD.share * weight[0];
  if (!view.range) {
    view.range = [Infinity, 0];
    for (let node = 0; node < view.tree.count; node++) {
      const { power_w } = seen(node) ? view.figures(node) : {};
      if (power_w > 0) view.range = [Math.min(view.range[0], power_w), Math.max(view.range[1], power_w)];
    }
  }
  return view.range;
}

function cellAt(event) {
  const { left, top } = at("icicle").getBoundingClientRect();
  const [x, row] = [event.clientX - left, Math.floor((event.clientY - top) / ICICLE.row)];
  return cells.find((cell) => cell[1] === row && x >= cell[0] && x < cell[0] + cell[2]);
}

function listenIcicle(current) {
  const canvas = at("icicle");
  canvas.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    canvas.style.cursor = cell ? "pointer" : "";
    if (!cell) return hideTip();
    const { view } = current();
    const weight = view.weight(state.metric);
    showTip(
      event.clientX,
      event.clientY,
      view.tree.path(cell[3]) || "all",
      tipLines(view, view.figures(cell[3]), weight[cell[3]] / weight[0]),
    );
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell) goTo(current().view.tree, cell[3]);
  });
}

// To a layer itself; to an operation where it is.
function goTo(tree, node) {
  hideTip();
  if (!node || tree.children(node).length) return setState({ path: node ? tree.path(node) : null });
  const above = tree.parent[node];
  setState({ path: above ? tree.path(above) : null });
  setState({ selected: tree.path(node) });
}
