// Find a name anywhere in the tree, and go there.

const FOUND = 30;
let results = [];
let marked = 0;
const paths = new WeakMap();

// Every path in small letters, made when first asked for.
function pathsOf(tree) {
  if (!paths.has(tree)) {
    const made = [""];
    for (let node = 1; node < tree.count; node++)
      made.push(
        tree.parent[node]
          ? `${made[tree.parent[node]]}/${tree.name(node).toLowerCase()}`
          : tree.name(node).toLowerCase(),
      );
    paths.set(tree, made);
  }
  return paths.get(tree);
}

// All words must be in the path, the last one in the name itself; those with most energy first.
function search(view, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  const { tree } = view;
  const weight = view.weight(state.metric);
  const all = pathsOf(tree);
  const last = words[words.length - 1];
  const found = [];
  for (let node = 1; node < tree.count; node++) {
    const path = all[node];
    if (!words.every((word) => path.includes(word))) continue;
    const above = all[tree.parent[node]].length;
    if (path.lastIndexOf(last) + last.length > above || last.includes("/")) found.push(node);
  }
  const exact = (node) => tree.name(node).toLowerCase() === last || all[node] === text.toLowerCase();
  return found.sort((a, b) => exact(b) - exact(a) || weight[b] - weight[a] || a - b).slice(0, FOUND);
}

function drawFound(view) {
  const [field, list] = [at("search"), at("found")];
  const { tree } = view;
  const weight = view.weight(state.metric);
  list.hidden = !field.value.trim();
  field.setAttribute("aria-expanded", String(!list.hidden));
  field.setAttribute("aria-activedescendant", results.length ? `found-${marked}` : "");
  list.replaceChildren(
    ...results.map((node, i) =>
      element(
        "li",
        {
          role: "option",
          id: `found-${i}`,
          "aria-selected": String(i === marked),
          "data-path": tree.path(node),
          on: {
            pointerdown: (event) => {
              event.preventDefault();
              jump(view, node);
            },
          },
        },
        element("span", { class: tree.children(node).length ? "shape layer" : "shape operation" }),
        element("span", { class: "path" }, shortened(visible(tree.path(node)), 160)),
        element("small", {}, weight[0] > 0 ? percent(weight[node] / weight[0]) : ""),
      ),
    ),
  );
  if (!list.hidden && !results.length) list.replaceChildren(element("li", { class: "none" }, "no such name"));
  const active = list.children[marked];
  if (active) active.scrollIntoView({ block: "nearest" });
}

function jump(view, node) {
  closeSearch();
  wantsFocus = true;
  goTo(view.tree, node);
}

function closeSearch() {
  at("search").value = "";
  at("found").hidden = true;
  at("search").setAttribute("aria-expanded", "false");
  results = [];
}

function listenSearch(current) {
  const field = at("search");
  field.addEventListener("input", () => {
    marked = 0;
    results = search(current().view, field.value);
    drawFound(current().view);
  });
  field.addEventListener("blur", () => (at("found").hidden = true));
  field.addEventListener("focus", () => field.value && drawFound(current().view));
  field.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Escape") {
      closeSearch();
      field.blur();
    } else if (event.key === "Enter" && results.length) jump(current().view, results[marked]);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const step = event.key === "ArrowDown" ? 1 : -1;
      marked = (marked + step + results.length) % Math.max(1, results.length);
      drawFound(current().view);
    } else return;
    event.preventDefault();
  });
}
