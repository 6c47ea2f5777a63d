// Operations of the layer shown. Only the lines in sight are there, so that any number of them is smooth.

const LINE = 30;
const PRINTED = 30;
let sorted = { key: null, entries: [] };

// What is more than noise before what is not, each by falling difference.
const beyondFirst = (e) =>
  ["more", "less", "new", "gone"].includes(e.verdict) ? Math.abs(e.difference_j) : -1 / Math.abs(e.difference_j);

const RUN_COLUMNS = [
  { key: "name", title: "name", text: true },
  { key: "phase", title: "phase", text: true },
  { key: "device", title: "device", text: true },
  { key: "energy_j", title: "energy ± 95 %", cell: (e) => energyText(e.energy_j, e.uncertainty_j) },
  {
    key: "share",
    title: "share",
    hint: "of its device's energy, idle included",
    cell: (e) => percent(e.share),
  },
  {
    key: "power_w",
    title: "power",
    hint: "mean while busy",
    cell: (e) => si(e.power_w, "W", e.uncertainty_j > 0.1 * e.energy_j ? 2 : 3),
  },
  { key: "busy_s", title: "busy", cell: (e) => seconds(e.busy_s) },
  { key: "count", title: "count", cell: (e) => countText(e.count) },
  { key: "basis", title: "rests on", hint: "what the uncertainty rests on", text: true },
];
const changeColumns = (noise) => [
  { key: "name", title: "name", text: true },
  { key: "phase", title: "phase", text: true },
  { key: "a_j", title: "A", cell: (e) => joules(e.a_j) },
  { key: "b_j", title: "B", cell: (e) => joules(e.b_j) },
  {
    key: "difference_j",
    title: `B − A ${noise}`,
    cell: (e) => signed(energyText(e.difference_j, e.half_width_j)),
    size: beyondFirst,
  },
  { key: "verdict", title: "", text: true, cell: (e) => verdictChip(e.verdict) },
];

function columnsOf(view) {
  if (view.kind === "changes") return changeColumns(view.noise);
  const devices = new Set(view.chosen.map((row) => view.rows.device[row])).size;
  return RUN_COLUMNS.filter(
    (column) =>
      (column.key !== "device" || (view.device === "all" && devices > 1)) &&
      (column.key !== "phase" || view.phase === "all"),
  );
}

function sortedEntries(view, node) {
  const { tree } = view;
  const inside = view.entries().filter((entry) => tree.inside(entry.node, node));
  const columns = columnsOf(view);
  const usual =
    view.kind === "changes"
      ? "difference_j"
      : { power: "power_w", time: "busy_s", energy: "energy_j" }[state.metric];
  const [wanted, direction] = (state.sort || usual).split(" ");
  const column = columns.find((each) => each.key === wanted) || columns[3];
  const value = column.key === "name" ? (e) => places(tree)[e.node] : column.size || ((e) => e[column.key]);
  const keyed = inside.map((entry) => [value(entry), entry]);
  // Figures begin with the largest, names with the first letter.
  const rising = (direction === "up") !== Boolean(column.text);
  const sign = rising ? 1 : -1;
  keyed.sort(
    ([a], [b]) =>
      sign * (column.text && column.key !== "name" ? compareTexts(a ?? "", b ?? "") : rank(a) - rank(b)),
  );
  return { columns, by: column.key, direction, rising, entries: keyed.map(([, entry]) => entry) };
}

const compareTexts = new Intl.Collator("en", { numeric: true }).compare;

// Each node's place by name. Siblings are few, all names are many.
const placesOf = new WeakMap();
function places(tree) {
  if (!placesOf.has(tree)) {
    const found = new Int32Array(tree.count);
    const waiting = [0];
    for (let place = 0; waiting.length; place++) {
      const node = waiting.pop();
      found[node] = place;
      for (const child of [...tree.children(node)].sort((a, b) => compareTexts(tree.name(b), tree.name(a))))
        waiting.push(child);
    }
    placesOf.set(tree, found);
  }
  return placesOf.get(tree);
}

// What is not known stands last among the large ones.
const rank = (value) => (absent(value) ? -Infinity : value);

function drawTable(view, node) {
  const field = at("table");
  sorted = { ...sortedEntries(view, node), view, node };
  const { columns, by, direction, rising, entries } = sorted;
  const head = element(
    "div",
    { role: "row", class: "head" },
    ...columns.map((column) =>
      element(
        "span",
        {
          role: "columnheader",
          class: `cell ${column.key}`,
          "aria-sort": column.key === by ? (rising ? "ascending" : "descending") : "none",
        },
        element(
          "button",
          {
            type: "button",
            title: column.hint,
            "data-sort": column.key,
            on: {
              click: () =>
                setState({ sort: column.key === by && direction !== "up" ? `${column.key} up` : column.key }),
            },
          },
          column.title || "verdict",
        ),
      ),
    ),
  );
  const body = element("div", { role: "rowgroup", class: "lines" });
  field.className = `${view.kind} ${columns.map((column) => `has-${column.key}`).join(" ")}`;
  field.setAttribute("aria-rowcount", entries.length + 1);
  field.replaceChildren(head, body);
  field.scrollTop = 0;
  const chosen =
    state.selected === null
      ? -1
      : entries.findIndex((entry) => view.tree.path(entry.node) === state.selected);
  if (chosen > 3) field.scrollTop = (chosen - 2) * LINE;
  drawLines();
  const where = node ? `in ${view.tree.called(node)}` : "in all";
  at("table-note").textContent = entries.length
    ? `${plural(entries.length, "row")} ${where}${verdictCounts(view, entries)}`
    : `no rows ${where}`;
}

function verdictCounts(view, entries) {
  if (view.kind !== "changes") return "";
  const counts = new Map(["less", "more", "new", "gone", "inside the noise", "unknown"].map((verdict) => [verdict, 0]));
  for (const { verdict } of entries) counts.set(verdict, (counts.get(verdict) || 0) + 1);
  const some = [...counts].filter(([, count]) => count);
  return `: ${some.map(([verdict, count]) => `${count.toLocaleString("en")} ${verdict}`).join(", ")}`;
}

function drawLines() {
  const field = at("table");
  const body = field.querySelector(".lines");
  if (!body) return;
  const { entries } = sorted;
  const all = printing.matches ? Math.min(PRINTED, entries.length) : entries.length;
  const height = field.clientHeight || 600;
  const first = printing.matches ? 0 : Math.max(0, Math.floor(field.scrollTop / LINE) - 6);
  const last = printing.matches ? all : Math.min(all, Math.ceil((field.scrollTop + height) / LINE) + 6);
  body.style.height = `${all * LINE}px`;
  const lines = [];
  for (let i = first; i < last; i++) lines.push(lineElement(entries[i], i));
  body.replaceChildren(...lines);
}

function lineElement(entry, i) {
  const { view, columns } = sorted;
  const { tree } = view;
  const path = tree.path(entry.node);
  const line = element(
    "div",
    {
      role: "row",
      class: "line",
      "aria-rowindex": i + 2,
      "aria-current": path === state.selected ? "true" : null,
      "data-name": path,
      ...dataOf(entry),
    },
    ...columns.map((column) =>
      column.key === "name"
        ? nameCell(tree, entry, path)
        : element(
            "span",
            { role: "cell", class: `cell ${column.key}` },
            column.cell ? column.cell(entry) : visible(entry[column.key] ?? NONE),
          ),
    ),
  );
  line.style.top = `${i * LINE}px`;
  if (view.kind === "run")
    line.style.setProperty("--share", `${Math.min(100, 100 * intensity(entry.share))}%`);
  return line;
}

// The operation stands out; the layers it is in give way where there is no room.
function nameCell(tree, entry, path) {
  const name = tree.called(entry.node);
  const shown =
    sorted.node && entry.node !== sorted.node ? path.slice(tree.path(sorted.node).length + 1) : path;
  const above = visible(shown.slice(0, shown.length - tree.name(entry.node).length));
  return element(
    "span",
    { role: "rowheader", class: "cell name" },
    element(
      "button",
      { type: "button", title: shortened(visible(path), 1000), on: { click: () => goTo(tree, entry.node) } },
      element("span", { class: "above" }, element("bdi", { dir: "ltr" }, above)),
      element("b", {}, name),
    ),
  );
}

function listenTable() {
  let asked = 0;
  at("table").addEventListener(
    "scroll",
    () => {
      cancelAnimationFrame(asked);
      asked = requestAnimationFrame(drawLines);
    },
    { passive: true },
  );
}
