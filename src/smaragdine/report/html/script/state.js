// What is shown, kept in the address: a link leads back to the same view.

const DEFAULTS = {
  run: "0",
  metric: "energy",
  phase: "all",
  device: "all",
  level: "step",
  merged: false,
  path: null,
  sort: "",
  everything: false,
  selected: null,
};
const state = { ...DEFAULTS };
const watchers = [];

function setState(changes) {
  const zoomed = "path" in changes && changes.path !== state.path;
  Object.assign(state, zoomed ? { selected: null, everything: false } : {}, changes);
  const hash = hashOf(state);
  if (hash !== location.hash.slice(1)) {
    // Where you are is a step of the browser's history, how you look at it is not.
    if (zoomed) history.pushState(null, "", `#${hash}`);
    else history.replaceState(null, "", `#${hash}`);
  }
  for (const watcher of watchers) watcher();
}

function hashOf(values) {
  const parts = Object.entries(values).filter(([name, value]) => value !== startOf(name));
  return parts.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
}

// Where a fresh page begins: a choice that this run does not have is none.
const begins = {};
const startOf = (name) => (name in begins ? begins[name] : DEFAULTS[name]);

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1).replace(/\+/g, "%2B"));
  for (const name of Object.keys(DEFAULTS)) {
    const value = given.get(name);
    state[name] =
      value === null ? startOf(name) : typeof DEFAULTS[name] === "boolean" ? value === "true" : value;
  }
}
