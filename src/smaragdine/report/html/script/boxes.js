// What a box of the diagram says and how it looks; the same figures stand in its tooltip.

function boxElement(view, node, box, total, range) {
  const { tree } = view;
  const figures = view.figures(box.node, box.itself);
  const name = box.itself ? `${tree.called(node)} itself` : tree.called(box.node);
  const share = total > 0 ? box.value / total : NaN;
  const look =
    view.kind === "changes" ? changeLook(figures, view.figures(node)) : runLook(figures, share, range);
  const kind = box.layer ? "layer" : "operation";
  const button = element(
    "button",
    {
      type: "button",
      class: `box ${kind}`,
      tabindex: "-1",
      "aria-label": `${name}, ${kind}, ${look.said}`,
      "aria-pressed": box.layer ? null : String(tree.path(box.node) === state.selected),
      "data-node": box.node,
      "data-path": tree.path(box.node),
      "data-kind": kind,
      "data-share": Number.isNaN(share) ? null : share,
      ...dataOf(figures),
      on: {
        click: () => openBox(tree, box),
        pointermove: (event) =>
          showTip(event.clientX, event.clientY, tree.path(box.node) || name, tipLines(view, figures, share)),
        pointerleave: hideTip,
        focus: (event) => {
          if (!event.target.matches(":focus-visible")) return;
          const { left, bottom } = event.target.getBoundingClientRect();
          showTip(left, bottom - 12, tree.path(box.node) || name, tipLines(view, figures, share));
        },
        blur: hideTip,
      },
    },
    element("span", { class: "name" }, name),
    element("span", { class: "big" }, look.big),
    element("span", { class: "small" }, look.small),
  );
  Object.assign(button.style, { backgroundColor: look.fill, color: look.ink });
  return button;
}

// Powers differ by little: from the lowest, pale, to the highest here.
const within = (value, [low, high]) => (high > low ? 0.08 + (0.92 * (value - low)) / (high - low) : 0.5);

const dataOf = (figures) =>
  Object.fromEntries(
    Object.entries(figures)
      .filter(
        ([, value]) => typeof value === "string" || (Number.isFinite(value) && typeof value === "number"),
      )
      .map(([name, value]) => [`data-${name.replace(/_/g, "-")}`, value]),
  );

function runLook(figures, share, range) {
  if (state.metric === "power") {
    return {
      ...colour(within(figures.power_w, range)),
      big: watts(figures.power_w),
      small: joules(figures.energy_j),
      said: `${watts(figures.power_w)} while busy`,
    };
  }
  const shown = percent(share);
  const small = state.metric === "time" ? seconds(figures.busy_s) : joules(figures.energy_j);
  return { ...colour(intensity(share)), big: shown, small, said: `${shown}, ${small}` };
}

// What cannot be told from noise is grey; what nobody repeated is pale, and its box dashed.
function changeLook(figures, parent) {
  const { difference_j, verdict } = figures;
  const whole_j = Math.max(zero(parent.a_j), zero(parent.b_j));
  const t = 0.15 + 0.85 * intensity(Math.abs(difference_j) / whole_j);
  const side = difference_j > 0 ? "more" : "less";
  const look =
    verdict === "inside the noise"
      ? { fill: token("panel"), ink: token("dim") }
      : colour(verdict === "unknown" ? 0.4 * t : t, verdict === "unknown" ? side : verdict);
  const alone = verdict === "new" || verdict === "gone";
  const relative = alone ? verdict : signed(percent(difference_j / figures.a_j));
  return {
    ...look,
    big: relative,
    small: signed(joules(difference_j)),
    said: `${relative}, ${joules(difference_j)}, ${verdict}`,
  };
}

function restElement(view, node, rest, total) {
  const sums = makeSums(MEASURES.length);
  const value = rest.reduce((sum, box) => sum + box.value, 0);
  if (view.kind === "run")
    for (const box of rest) MEASURES.forEach((m, i) => sums.add(i, view.figures(box.node, box.itself)[m]));
  const values = sums.values();
  const figures =
    view.kind === "run" ? withPower(Object.fromEntries(MEASURES.map((m, i) => [m, values[i]]))) : {};
  return element(
    "button",
    {
      type: "button",
      class: "box rest",
      tabindex: "-1",
      "data-kind": "rest",
      "data-parts": rest.length,
      ...dataOf(figures),
      "aria-label": `${rest.length} smaller parts, show all`,
      on: { click: () => setState({ everything: true }) },
    },
    element("span", { class: "name" }, `${rest.length} smaller`),
    element("span", { class: "big" }, total > 0 ? percent(value / total) : NONE),
    element("span", { class: "small" }, "show all"),
  );
}

function tipLines(view, figures, share) {
  if (view.kind === "changes") {
    return [
      ["A", joules(figures.a_j)],
      ["B", joules(figures.b_j)],
      ["B − A", signed(joules(figures.difference_j))],
      [view.noise, joules(figures.half_width_j)],
      ["", figures.verdict],
    ];
  }
  return [
    ["energy", energyText(figures.energy_j, figures.uncertainty_j)],
    ...(share === undefined ? [] : [["share", percent(share)]]),
    ["power", watts(figures.power_w)],
    ["busy", seconds(figures.busy_s)],
    ["count", countText(figures.count)],
  ];
}
