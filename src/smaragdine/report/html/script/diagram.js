// The Energy Distribution Diagram: one level as boxes. Rounded: a layer, sharp: a tensor operation.

const FOLD = { share: 0.001, least: 3, many: 16, shareOfMany: 0.01, most: 48, ever: 600 };

function boxesAt(view, node, metric) {
  const weight = view.weight(metric);
  const all = [...view.tree.children(node)].map((child) => ({
    id: child,
    node: child,
    value: weight[child],
    layer: view.tree.children(child).length > 0,
  }));
  if (view.alone(node))
    all.push({ id: -1, node, value: view.ownWeight(metric)[node], layer: false, itself: true });
  if (!all.length) all.push({ id: node, node, value: weight[node], layer: false });
  return all.filter((box) => countOf(view, box) > 0).sort((a, b) => b.value - a.value || a.id - b.id);
}

const countOf = (view, box) => (view.kind === "changes" ? 1 : view.figures(box.node, box.itself).count);

// What is too small to be read is one box, unless all are asked for.
function folded(boxes, total) {
  const most = state.everything ? FOLD.ever : FOLD.most;
  const least = (i) => (state.everything ? 0 : i < FOLD.many ? FOLD.share : FOLD.shareOfMany) * total;
  const small = (box, i) => box.id !== selectedNode() && (i >= most || !(box.value >= least(i)));
  const kept = boxes.filter((box, i) => !small(box, i));
  const rest = boxes.filter(small);
  return rest.length < FOLD.least && boxes.length <= most ? { kept: boxes, rest: [] } : { kept, rest };
}

let selectedNode = () => -2;

function drawDiagram(view, node) {
  const field = at("boxes");
  const held = field.contains(document.activeElement);
  selectedNode = () => (state.selected === null ? -2 : view.tree.find(state.selected));
  const boxes = boxesAt(view, node, state.metric);
  const total = view.weight(state.metric)[node];
  const { kept, rest } = folded(boxes, total);
  const width = widthOf(field);
  const ids = kept.map((box) => box.id);
  if (rest.length) ids.push(-3);
  const { places, paths, boxWidth, height } = layOut(ids, view.tree.edges(node), width);
  const powers = kept.map((box) => view.figures(box.node, box.itself).power_w).filter((power) => power > 0);
  const range = [Math.min(...powers), Math.max(...powers)];
  const made = kept.map((box) => boxElement(view, node, box, total, range));
  if (rest.length) made.push(restElement(view, node, rest, total));
  made.forEach((button, i) => {
    const place = places.get(ids[i]);
    Object.assign(button.style, {
      left: `${place.x}px`,
      top: `${place.y}px`,
      width: `${boxWidth}px`,
      height: `${BOX.height}px`,
    });
  });
  const picture = drawn("svg", { width, height: height + 4, "aria-hidden": "true" });
  picture.append(arrowHead());
  for (const path of paths) {
    picture.append(
      drawn("path", {
        d: path.d,
        class: "flow",
        "marker-end": "url(#head)",
        "data-source": view.tree.name(path.source),
        "data-target": view.tree.name(path.target),
      }),
    );
  }
  field.style.height = `${height + 4}px`;
  field.replaceChildren(picture, ...made);
  field.setAttribute("aria-label", `Parts of ${view.tree.called(node)}`);
  const start =
    made.find((box) => box.dataset.path === state.selected) ||
    made.find((box) => Number(box.dataset.node) === cameFrom) ||
    made[0];
  if (start) {
    start.tabIndex = 0;
    if (held || wantsFocus) start.focus({ preventScroll: !wantsFocus });
  }
  wantsFocus = false;
  at("diagram-note").textContent = diagramNote(view, node, boxes, paths);
  drawLegend(view);
}

let cameFrom = -2; // the layer one just left: the focus returns to it
let wantsFocus = false;

function diagramNote(view, node, boxes, paths) {
  if (!boxes.length) return "Nothing of it ran in this phase on this device.";
  const figures = view.figures(node);
  const what =
    view.kind === "changes"
      ? `A ${joules(figures.a_j)}, B ${joules(figures.b_j)}`
      : `${energyText(figures.energy_j, figures.uncertainty_j)}, ${seconds(figures.busy_s)} busy, ${watts(figures.power_w)}`;
  const parts = view.tree.children(node).length ? `, ${plural(boxes.length, "part")}` : "";
  return `${what}${parts}${paths.length ? "; arrows: dataflow" : ""}`;
}

function arrowHead() {
  const marker = drawn("marker", {
    id: "head",
    viewBox: "0 0 8 8",
    refX: "6",
    refY: "4",
    markerWidth: "7",
    markerHeight: "7",
    orient: "auto",
  });
  marker.append(drawn("path", { d: "M0 0.8 L7 4 L0 7.2 Z", class: "head" }));
  const defs = drawn("defs");
  defs.append(marker);
  return defs;
}

function openBox(tree, box) {
  hideTip();
  const path = tree.path(box.node);
  if (box.layer) zoomTo(path, tree.children(box.node)[0]);
  else setState({ selected: state.selected === path ? null : path });
}

// Focus goes along with the view: the first box on the way in, the layer one left on the way out.
function zoomTo(path, focus = -2) {
  cameFrom = focus;
  wantsFocus = at("boxes").contains(document.activeElement) || wantsFocus;
  setState({ path });
}

function zoomOut(view, node) {
  if (!node) return;
  const above = view.tree.parent[node];
  zoomTo(above ? view.tree.path(above) : null, node);
}

// The nearest box in the direction of an arrow key.
function moveFocus(key) {
  const from = document.activeElement.getBoundingClientRect();
  const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
  const distance = (box) => {
    const to = box.getBoundingClientRect();
    const [x, y] = [
      to.left + to.width / 2 - from.left - from.width / 2,
      to.top + to.height / 2 - from.top - from.height / 2,
    ];
    const [along, aside] = [x * dx + y * dy, Math.abs(x * dy) + Math.abs(y * dx)];
    return along > 4 ? along + 3 * aside : Infinity;
  };
  const boxes = [...at("boxes").querySelectorAll(".box")];
  const nearest = boxes.reduce((a, b) => (distance(b) < distance(a) ? b : a));
  if (distance(nearest) === Infinity) return;
  boxes.forEach((box) => (box.tabIndex = box === nearest ? 0 : -1));
  nearest.focus();
}

function drawLegend(view) {
  const steps = (hue) =>
    element(
      "span",
      { class: "ramp" },
      ...Array.from({ length: 12 }, (_, i) => {
        const piece = element("i");
        piece.style.backgroundColor = colour((i + 0.5) / 12, hue).fill;
        return piece;
      }),
    );
  const shapes = [
    element("span", { class: "shape layer" }),
    "layer",
    element("span", { class: "shape operation" }),
    "tensor operation",
  ];
  const scale =
    view.kind === "changes"
      ? [
          "less",
          element("span", { class: "ramp turned" }, steps("less")),
          "inside the noise",
          steps("more"),
          "more",
          element("span", { class: "shape unknown" }),
          "unknown",
          steps("new"),
          "new",
          steps("gone"),
          "gone",
        ]
      : state.metric === "power"
        ? ["lowest power", steps("much"), "highest here"]
        : ["0 %", steps("much"), "100 % of this level"];
  at("legend").replaceChildren(element("span", {}, ...shapes), element("span", {}, ...scale));
}
