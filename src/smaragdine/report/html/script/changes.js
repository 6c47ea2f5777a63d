// What changed from A to B, over the tree of all names of both.

function makeChanges(comparison) {
  const tree = makeTree(comparison.tree);
  const views = new Map();
  return {
    tree,
    level: comparison.level,
    devices: Object.keys(comparison.views).filter((name) => name !== "all"),
    phases: [...new Set(Object.values(comparison.views).flatMap((view) => view.phases.map(phaseName)))],
    figures: (device) => comparison.views[device],
    view({ device, phase }) {
      const key = JSON.stringify([device, phase]);
      if (!views.has(key))
        views.set(key, changesView(tree, comparison.views[device] || comparison.views.all, phase));
      return views.get(key);
    },
  };
}

const zero = (value) => (Number.isNaN(value) ? 0 : value);

function changesView(tree, rows, phase) {
  const names = rows.phases.map(phaseName);
  const chosen = [];
  for (let row = 0; row < rows.node.length; row++)
    if (phase === "all" || names[rows.phase[row]] === phase) chosen.push(row);
  // Half-widths add up, as biases do; what has no known noise may be all noise.
  const parts = {
    a_j: (row) => zero(rows.a_j[row]),
    b_j: (row) => zero(rows.b_j[row]),
    half_width_j: (row) => zero(rows.half_width_j[row]),
    unknown_j: (row) =>
      Number.isNaN(rows.half_width_j[row]) ? Math.abs(zero(rows.b_j[row]) - zero(rows.a_j[row])) : 0,
    count: () => 1,
  };
  const [totals, own] = [{}, {}];
  for (const [name, value] of Object.entries(parts)) {
    const sums = makeSums(tree.count);
    for (const row of chosen) sums.add(rows.node[row], value(row));
    own[name] = sums.values();
    for (let node = tree.count - 1; node > 0; node--) sums.move(node, tree.parent[node]);
    totals[name] = sums.values();
  }
  const both = (of) => of.a_j.map((a, node) => a + of.b_j[node]);
  const [weights, ownWeights] = [both(totals), both(own)];
  const view = { tree, kind: "changes", chosen, level: "", rows };
  view.figures = (node, alone = false) => {
    const of = alone ? own : totals;
    return judged({
      a_j: of.a_j[node],
      b_j: of.b_j[node],
      half_width_j: of.half_width_j[node],
      unknown_j: of.unknown_j[node],
    });
  };
  view.alone = (node) => tree.children(node).length > 0 && own.count[node] > 0;
  view.weight = () => weights;
  view.ownWeight = () => ownWeights;
  view.entries = () => (view.grouped = view.grouped || chosen.map((row) => changeEntry(rows, names, row)));
  return view;
}

function judged(change) {
  const difference_j = change.b_j - change.a_j;
  const size = Math.abs(difference_j);
  let verdict = difference_j > 0 ? "more" : "less";
  if (size <= change.half_width_j) verdict = "inside the noise";
  else if (size <= change.half_width_j + change.unknown_j) verdict = "noise not known";
  return { ...change, difference_j, verdict };
}

function changeEntry(rows, names, row) {
  const [a, b, half] = [rows.a_j[row], rows.b_j[row], rows.half_width_j[row]];
  const base = { node: rows.node[row], phase: names[rows.phase[row]], a_j: a, b_j: b, half_width_j: half };
  if (Number.isNaN(a)) return { ...base, difference_j: b, verdict: "only in B" };
  if (Number.isNaN(b)) return { ...base, difference_j: -a, verdict: "only in A" };
  const unknown_j = Number.isNaN(half) ? Math.abs(b - a) : 0;
  return { ...base, ...judged({ a_j: a, b_j: b, half_width_j: zero(half), unknown_j }), half_width_j: half };
}
