// What changed from A to B, over the tree of all names of both.

function makeChanges(comparison) {
  const tree = makeTree(comparison.tree);
  const views = new Map();
  return {
    tree,
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
  // Half-widths add up, as biases do. What has no known noise makes the sum's unknown, never nothing.
  const parts = {
    a_j: (row) => zero(rows.a_j[row]),
    b_j: (row) => zero(rows.b_j[row]),
    half_width_j: (row) => zero(rows.half_width_j[row]),
    unknown: (row) => (Number.isNaN(rows.half_width_j[row]) ? 1 : 0),
    in_a: (row) => (Number.isNaN(rows.a_j[row]) ? 0 : 1),
    in_b: (row) => (Number.isNaN(rows.b_j[row]) ? 0 : 1),
    count: () => 1,
  };
  const repeated = Math.max(...rows.runs) > 1;
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
  const view = { tree, kind: "changes", chosen, level: "", rows, noise: rows.noise };
  view.figures = (node, alone = false) => {
    const of = alone ? own : totals;
    return judged({
      a_j: of.in_a[node] ? of.a_j[node] : NaN,
      b_j: of.in_b[node] ? of.b_j[node] : NaN,
      half_width_j: of.unknown[node] ? NaN : of.half_width_j[node],
      repeated,
    });
  };
  view.alone = (node) => tree.children(node).length > 0 && own.count[node] > 0;
  view.weight = () => weights;
  view.ownWeight = () => ownWeights;
  view.entries = () => (view.grouped = view.grouped || chosen.map((row) => changeEntry(rows, names, row, repeated)));
  return view;
}

// The same verdicts as `smaragdine compare` has; nan: not there, or not known.
function judged({ a_j, b_j, half_width_j, repeated }) {
  const difference_j = zero(b_j) - zero(a_j);
  let verdict = difference_j > 0 ? "more" : "less";
  if (Number.isNaN(a_j)) verdict = "new";
  else if (Number.isNaN(b_j)) verdict = "gone";
  else if (difference_j === 0 || Math.abs(difference_j) <= half_width_j) verdict = "inside the noise";
  else if (Number.isNaN(half_width_j) || !repeated) verdict = "unknown";
  return { a_j, b_j, half_width_j, difference_j, verdict };
}

function changeEntry(rows, names, row, repeated) {
  const figures = { a_j: rows.a_j[row], b_j: rows.b_j[row], half_width_j: rows.half_width_j[row], repeated };
  return { node: rows.node[row], phase: names[rows.phase[row]], ...judged(figures) };
}
