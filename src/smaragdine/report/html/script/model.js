// Trees of names, and the figures of a run over them for what is chosen: level, device, phase, merged or not.

const MEASURES = ["energy_j", "busy_s", "count", "uncertainty_j"];

// Nodes stand before those below them, and all that is below a node follows it: a subtree is one range.
function makeTree(columns) {
  const { parent, segment, segments } = columns;
  const count = parent.length;
  const size = new Int32Array(count).fill(1);
  const depth = new Uint16Array(count);
  const first = new Int32Array(count + 1);
  for (let node = count - 1; node > 0; node--) size[parent[node]] += size[node];
  for (let node = 1; node < count; node++) {
    depth[node] = depth[parent[node]] + 1;
    first[parent[node] + 1]++;
  }
  for (let node = 0; node < count; node++) first[node + 1] += first[node];
  const place = first.slice();
  const below = new Int32Array(Math.max(0, count - 1));
  for (let node = 1; node < count; node++) below[place[parent[node]]++] = node;
  const edges = new Map();
  for (let i = 0; i < columns.edge_in.length; i++) {
    if (!edges.has(columns.edge_in[i])) edges.set(columns.edge_in[i], []);
    edges
      .get(columns.edge_in[i])
      .push([columns.edge_source[i], columns.edge_target[i], columns.edge_count[i]]);
  }
  const paths = [""];
  const tree = {
    count,
    parent,
    size,
    depth,
    name: (node) => segments[segment[node]],
    children: (node) => below.subarray(first[node], first[node + 1]),
    edges: (node) => edges.get(node) || [],
    inside: (node, above) => node >= above && node < above + size[above],
    above(node) {
      const found = [];
      for (let each = node; each; each = parent[each]) found.unshift(each);
      return found;
    },
    path: (node) =>
      (paths[node] ??= parent[node] ? `${tree.path(parent[node])}/${tree.name(node)}` : tree.name(node)),
    // The node at a path, or as far down as it leads.
    find(path) {
      let found = 0;
      if (path === null) return found;
      for (const name of path.split("/")) {
        const next = tree.children(found).find((child) => tree.name(child) === name);
        if (next === undefined) break;
        found = next;
      }
      return found;
    },
    called: (node) => (node ? visible(tree.name(node)) || "(no name)" : "all"),
  };
  return tree;
}

// Sums in twice the digits, so that a sum of rows is right to its last digit in whatever order they come.
function makeSums(count) {
  const high = new Float64Array(count);
  const low = new Float64Array(count);
  function add(place, value, rest) {
    const sum = high[place] + value;
    const part = sum - high[place];
    low[place] += high[place] - (sum - part) + (value - part) + rest;
    high[place] = sum;
  }
  return {
    add: (place, value) => add(place, value, 0),
    move: (from, to) => add(to, high[from], low[from]),
    values: () => high.map((value, i) => value + low[i]),
  };
}

function makeRun(data) {
  const run = {
    data,
    tree: data.tree ? makeTree(data.tree) : null,
    merged: data.merged ? makeTree(data.merged) : null,
  };
  const levels = new Map();
  const views = new Map();
  run.rows = (level) => {
    if (!levels.has(level)) levels.set(level, levelRows(data, level));
    return levels.get(level);
  };
  run.view = (chosen) => {
    const key = JSON.stringify([
      chosen.level,
      chosen.device,
      chosen.phase,
      chosen.merged && Boolean(run.merged),
    ]);
    if (!views.has(key)) views.set(key, makeView(run, chosen));
    return views.get(key);
  };
  return run;
}

function levelRows(data, level) {
  const given = data.levels[level];
  const rows = { ...data.rows, ...given.rows };
  for (const [name, how] of Object.entries(given.columns || {})) {
    rows[name] = how.times ? multiplied(rows, name, how.times) : how;
  }
  return rows;
}

function multiplied(rows, name, factors) {
  const by = rows.device_names.map((device) => factors[device]);
  // One after the other, as the accounting does: rounding would differ otherwise.
  return Float64Array.from(rows[name], (value, row) =>
    by[rows.device[row]].reduce((product, factor) => product * factor, value),
  );
}

function makeView(run, { level, device, phase, merged }) {
  const tree = merged && run.merged ? run.merged : run.tree;
  const rows = run.rows(level);
  const to = tree === run.merged ? run.data.merged.of_node : null;
  const chosen = [];
  for (let row = 0; row < rows.node.length; row++) {
    if (device !== "all" && rows.device_names[rows.device[row]] !== device) continue;
    if (phase !== "all" && phaseName(rows.phase_names[rows.phase[row]]) !== phase) continue;
    chosen.push(row);
  }
  const nodeOf = (row) => (to ? to[rows.node[row]] : rows.node[row]);
  const totals = {};
  const own = {};
  for (const measure of MEASURES) {
    const sums = makeSums(tree.count);
    const values = rows[measure];
    for (const row of chosen) sums.add(nodeOf(row), values[row]);
    own[measure] = sums.values();
    for (let node = tree.count - 1; node > 0; node--) sums.move(node, tree.parent[node]);
    totals[measure] = sums.values();
  }
  // What errs inside a sensor's window cancels inside it: sums of rows come with half-widths of their own.
  for (const place of new Set(chosen.map((row) => rows.device[row]))) {
    const [name, widths] = [rows.device_names[place], widthsOf(run, level, tree)];
    const mine = chosen.filter((row) => rows.device[row] === place);
    const sums = makeSums(tree.count);
    for (const row of mine) sums.add(nodeOf(row), rows.uncertainty_j[row]);
    const alone = sums.values();
    for (let node = tree.count - 1; node > 0; node--) sums.move(node, tree.parent[node]);
    putWidths(own.uncertainty_j, alone, widths(name, phase)?.own);
    putWidths(totals.uncertainty_j, sums.values(), widths(name, phase)?.below);
  }
  const view = { run, tree, rows, chosen, nodeOf, level, device, phase, kind: "run" };
  view.figures = (node, alone = false) => figuresAt(alone ? own : totals, node);
  // An operation and a layer at once: what it used itself is a part beside the others.
  view.alone = (node) => tree.children(node).length > 0 && own.count[node] > 0;
  view.weight = (metric) => totals[metric === "time" ? "busy_s" : "energy_j"];
  view.ownWeight = (metric) => own[metric === "time" ? "busy_s" : "energy_j"];
  view.entries = () => (view.grouped = view.grouped || entriesOf(view));
  view.phases = () => (view.byPhase = view.byPhase || phasesOf(view));
  return view;
}

// Half-widths of sums of rows, by device and phase. Where rows of a level are those traced times a factor, so
// are their sums.
function widthsOf(run, level, tree) {
  const { traced, [level]: given } = run.data.levels;
  const which = tree === run.merged ? "merged" : "plain";
  const factors = given.widths ? null : given.columns?.uncertainty_j?.times;
  return (device, phase) => {
    const found = (given.widths || traced?.widths)?.[which][device]?.[phase];
    if (!found || !factors) return found;
    const factor = factors[device].reduce((product, each) => product * each, 1);
    const times = ({ node, uncertainty_j }) => ({ node, uncertainty_j: uncertainty_j.map((j) => j * factor) });
    return { own: times(found.own), below: times(found.below) };
  };
}

// The sum of one device's rows at each node gives way to what is known of them together.
function putWidths(values, summed, widths) {
  if (widths) widths.node.forEach((node, i) => (values[node] += widths.uncertainty_j[i] - summed[node]));
}

const phaseName = (phase) => (phase === null ? "not known" : phase);

function figuresAt(of, node) {
  return withPower(Object.fromEntries(MEASURES.map((measure) => [measure, of[measure][node]])));
}

function withPower(figures) {
  return { ...figures, power_w: figures.busy_s > 0 ? figures.energy_j / figures.busy_s : NaN };
}

// One entry for each row, or for all rows of one merged name, device and phase.
function entriesOf({ rows, chosen, nodeOf, tree, run, level }) {
  const { devices } = run.data.levels[level];
  const entry = (row, values) =>
    withPower({
      node: nodeOf(row),
      device: rows.device_names[rows.device[row]],
      phase: phaseName(rows.phase_names[rows.phase[row]]),
      basis: rows.basis_names[rows.basis[row]],
      // Of its device's energy, idle included, as everywhere else.
      share: values[0] / devices[rows.device_names[rows.device[row]]].total_j,
      ...Object.fromEntries(MEASURES.map((measure, i) => [measure, values[i]])),
    });
  if (tree !== run.merged) {
    return chosen.map((row) =>
      entry(
        row,
        MEASURES.map((measure) => rows[measure][row]),
      ),
    );
  }
  const groups = new Map();
  for (const row of chosen) {
    const key = `${nodeOf(row)} ${rows.device[row]} ${rows.phase[row]}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  const sums = MEASURES.map(() => makeSums(groups.size));
  const widest = [];
  [...groups.values()].forEach((members, place) => {
    for (const row of members) MEASURES.forEach((measure, i) => sums[i].add(place, rows[measure][row]));
    // The sum rests on what its widest part rests on.
    widest.push(members.reduce((a, b) => (rows.uncertainty_j[b] > rows.uncertainty_j[a] ? b : a)));
  });
  const values = sums.map((sum) => sum.values());
  const widths = widthsOf(run, level, tree);
  const known = new Map();
  widest.forEach((row, place) => {
    const [device, phase] = [rows.device_names[rows.device[row]], phaseName(rows.phase_names[rows.phase[row]])];
    const key = `${device} ${phase}`;
    if (!known.has(key)) {
      const own = widths(device, phase)?.own;
      known.set(key, new Map(own ? Array.from(own.node, (node, i) => [node, own.uncertainty_j[i]]) : []));
    }
    const width = known.get(key).get(nodeOf(row));
    if (width !== undefined) values[MEASURES.indexOf("uncertainty_j")][place] = width;
  });
  return widest.map((row, place) =>
    entry(
      row,
      values.map((of) => of[place]),
    ),
  );
}

function phasesOf(view) {
  const names = view.rows.phase_names.map(phaseName);
  const sums = makeSums(names.length);
  for (const row of view.chosen) sums.add(view.rows.phase[row], view.rows.energy_j[row]);
  return [...sums.values()]
    .map((energy, i) => [names[i], energy])
    .filter(([, energy]) => energy > 0)
    .sort((a, b) => b[1] - a[1]);
}

// Energy of the devices chosen: rows + idle = total.
function conservation(run, level, device) {
  const given = run.data.levels[level];
  const names = Object.keys(given.devices).filter((name) => device === "all" || name === device);
  const rows = run.rows(level);
  const sums = makeSums(3);
  for (const name of names) {
    sums.add(1, given.devices[name].idle_j);
    sums.add(2, given.devices[name].total_j);
  }
  for (let row = 0; row < rows.node.length; row++) {
    if (names.includes(rows.device_names[rows.device[row]])) sums.add(0, rows.energy_j[row]);
  }
  const [rows_j, idle_j, total_j] = sums.values();
  return { rows_j, idle_j, total_j };
}
