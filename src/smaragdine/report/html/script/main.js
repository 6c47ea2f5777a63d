// Puts the parts together: one state, one view of it, all parts drawn from that.

const report = { data: null, runs: [], changes: null };

function current() {
  const changed = state.run === "changes" && report.changes;
  const run = report.runs[Number(state.run)] || report.runs[0];
  if (!changed && !run.tree) return { view: null, node: 0 };
  const view = changed ? report.changes.view(valid(changeChoices())) : run.view(valid(choicesOf(run)));
  return { view, node: view.tree.find(state.path) };
}

// A link may come from another report: what this one does not have is as at the beginning.
function valid(choices) {
  const chosen = { ...state };
  for (const [name, values] of Object.entries(choices))
    if (!values.includes(state[name]))
      chosen[name] = values.includes(startOf(name)) ? startOf(name) : values[0];
  return chosen;
}

const changeChoices = () => ({
  device: ["all", ...report.changes.devices],
  phase: ["all", ...report.changes.phases.sort(byPhase)],
});

function choicesOf(run) {
  const rows = run.data.rows;
  const devices = Object.keys(Object.values(run.data.levels)[0].devices).filter((name) =>
    rows.device_names.includes(name),
  );
  return {
    level: Object.keys(run.data.levels),
    device: devices.length > 1 ? ["all", ...devices] : devices.length ? devices : ["all"],
    phase: ["all", ...rows.phase_names.map(phaseName).sort(byPhase)],
  };
}

const PHASES = ["forward", "backward", "optimizer", "other", "not known"];
const byPhase = (a, b) => PHASES.indexOf(a) - PHASES.indexOf(b);

function drawControls(view) {
  const groups = [];
  const group = (name, label, options) =>
    options.length > 1 &&
    groups.push(
      element(
        "div",
        { class: "group", role: "group", "aria-label": label },
        ...options.map(([value, text]) =>
          element(
            "button",
            {
              type: "button",
              "data-set": name,
              "data-value": String(value),
              "aria-pressed": String(String(shown[name]) === String(value)),
              on: {
                click: () =>
                  setState({
                    [name]: value,
                    ...(name === "run" || name === "merged" ? { selected: null, path: state.path } : {}),
                  }),
              },
            },
            text,
          ),
        ),
      ),
    );
  const run = report.runs[Number(state.run)] || report.runs[0];
  const choices = !view ? {} : view.kind === "run" ? choicesOf(run) : changeChoices();
  const shown = valid(choices);
  if (report.runs.length > 1)
    group("run", "Run", [["0", "A"], ["1", "B"], ...(report.changes ? [["changes", "B − A"]] : [])]);
  if (view && view.kind === "run")
    group("metric", "Measure", [
      ["energy", "Energy"],
      ["power", "Power"],
      ["time", "Time"],
    ]);
  if (view) {
    group(
      "phase",
      "Phase",
      choices.phase.map((phase) => [phase, phase === "all" ? "All phases" : capital(phase)]),
    );
    group(
      "device",
      "Device",
      choices.device.map((device) => [device, device === "all" ? "All devices" : visible(device)]),
    );
  }
  if (view && view.kind === "run") {
    group(
      "level",
      "Steps",
      choices.level.map((level) => [level, level === "step" ? "One step" : "All traced"]),
    );
    if (run.merged)
      group("merged", "Repeated layers", [
        [false, "Each layer"],
        [true, "Merged"],
      ]);
  }
  at("controls").replaceChildren(...groups);
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function drawCrumbs(view, node) {
  const crumb = (each, last) =>
    element(
      "li",
      {},
      element(
        "button",
        {
          type: "button",
          "aria-current": last ? "location" : null,
          "data-path": each ? view.tree.path(each) : null,
          on: {
            click: () =>
              zoomTo(each ? view.tree.path(each) : null, last ? -2 : firstBelow(view.tree, each, node)),
          },
        },
        shortened(view.tree.called(each), 60),
      ),
    );
  const above = node ? [0, ...view.tree.above(node)] : [0];
  at("crumbs").replaceChildren(
    element("ol", {}, ...above.map((each, i) => crumb(each, i === above.length - 1))),
  );
}

// The part of `above` that `node` is in.
function firstBelow(tree, above, node) {
  const way = [0, ...tree.above(node)];
  return way[way.indexOf(above) + 1] ?? -2;
}

let asked = 0;

function draw() {
  const { view, node } = current();
  const kept = document.activeElement && document.activeElement.closest("#controls [data-set]");
  const again = kept
    ? `[data-set="${kept.dataset.set}"][data-value="${CSS.escape(kept.dataset.value)}"]`
    : null;
  const crumbHeld = at("crumbs").contains(document.activeElement);
  drawControls(view);
  if (again) at("controls").querySelector(again)?.focus();
  for (const id of ["diagram", "whole", "names"]) at(id).hidden = !view;
  at("bar").hidden = !view && report.runs.length === 1;
  at("search-field").hidden = !view;
  document.querySelector("main").className = view ? view.kind : "";
  at("empty")?.remove();
  drawBalance(view);
  if (view) {
    drawCrumbs(view, node);
    if (crumbHeld) at("crumbs").querySelector("[aria-current]").focus();
    drawDiagram(view, node);
    drawIcicle(view, node);
    drawTable(view, node);
    at("said").textContent = at("diagram-note").textContent;
  } else document.querySelector("main").prepend(emptyState());
  drawPower(view, node, report);
}

function emptyState() {
  const run = report.runs[Number(state.run)] || report.runs[0];
  const { data } = run;
  const why =
    data.reason ||
    (data.events
      ? "Operations were traced, but no power was measured that could be shared among them: smaragdine doctor says what this machine can measure."
      : `No operations: ${data.why_untraced}.`);
  return element(
    "section",
    { id: "empty" },
    element("h2", {}, "Where the energy goes"),
    element("p", { class: "missing" }, visible(why)),
  );
}

function listenKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { view, node } = current();
    if (!view) return;
    const inBoxes = at("boxes").contains(document.activeElement);
    if (event.key === "/") at("search").focus();
    else if (event.key === "Backspace" || event.key === "Escape") {
      hideTip();
      wantsFocus = true;
      zoomOut(view, node);
    } else if (inBoxes && event.key.startsWith("Arrow")) moveFocus(event.key);
    else return;
    event.preventDefault();
  });
}

async function main() {
  try {
    report.data = await unpack(at("data").textContent);
  } catch (error) {
    const old = typeof DecompressionStream === "undefined";
    document.body.prepend(
      element(
        "p",
        { class: "failed" },
        old
          ? "This browser is too old for the report: it cannot decompress. Chrome 80, Firefox 113 and Safari 16.4 can."
          : `The report is damaged: ${error}. Write it again with smaragdine report RUN --html FILE.`,
      ),
    );
    return;
  }
  at("data").remove();
  report.runs = report.data.runs.map(makeRun);
  const { comparison } = report.data;
  report.changes = comparison && !comparison.reason ? makeChanges(comparison) : null;
  if (report.changes) begins.run = "changes";
  const first = report.runs.find((run) => run.tree);
  // A GPU where there is one: that is where the model is.
  if (first)
    begins.device =
      choicesOf(first).device.find((name) => name.startsWith("gpu")) || choicesOf(first).device[0];
  if (first) begins.level = choicesOf(first).level[0];
  readHash();
  drawHeader(report);
  makeBands(report);
  watchers.push(draw);
  listenKeys();
  listenSearch(current);
  listenIcicle(current);
  listenTable();
  listenPower(() => {
    const { view, node } = current();
    drawPower(view, node, report);
  });
  draw();
  addEventListener("popstate", () => {
    readHash();
    draw();
  });
  addEventListener("resize", () => {
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(draw);
  });
  for (const media of [printing, darkly]) media.addEventListener("change", draw);
  document.documentElement.dataset.ready = "";
}

main();
