// What ran, where, and what it used; how the rows add up; what one must know besides the figures.

function drawHeader(report) {
  const { runs, changes, data } = report;
  const parts = [
    element("p", { class: "brand" }, "Smaragdine", element("span", {}, "energy report"), themeButton()),
  ];
  runs.forEach((run, i) => parts.push(runHeader(run.data, runs.length > 1 ? "AB"[i] : "")));
  if (data.comparison) parts.push(comparisonHeader(data.comparison, changes));
  parts.push(element("div", { id: "balance" }));
  at("header").replaceChildren(...parts);
  at("footer").replaceChildren(
    ...allRemarks(runs).map((line) => element("p", { class: "remark" }, visible(line))),
    element(
      "p",
      { class: "note" },
      `Smaragdine ${data.version}. Energies in joules over the time shown; ± is a 95 % interval, and behind epochs a standard deviation. Keys: / finds, arrows move, Enter zooms in, Backspace out.`,
    ),
  );
}

function themeButton() {
  return element(
    "button",
    {
      id: "theme",
      type: "button",
      "aria-label": "Light or dark",
      title: "Light or dark",
      on: {
        click() {
          document.documentElement.dataset.theme = isDark() ? "light" : "dark";
          setState({});
        },
      },
    },
    "◐",
  );
}

function runHeader(data, letter) {
  const { figures, host } = data;
  const facts = [
    dateText(data.begin_ms),
    seconds(figures.duration_s),
    host.hostname,
    host.cpu,
    ...Object.entries(data.libraries)
      .filter(([name]) => ["torch", "tensorflow", "keras", "jax", "flax", "transformers"].includes(name))
      .map(([name, version]) => `${name} ${version}`),
  ].filter(Boolean);
  return element(
    "section",
    { class: "run", "aria-label": letter ? `Run ${letter}` : "The run" },
    element(
      "h1",
      {},
      letter ? element("span", { class: "letter" }, letter) : null,
      element("code", {}, visible(data.command || data.title)),
      statusChip(data),
    ),
    element("p", { class: "note" }, facts.map(visible).join("  ·  ")),
    Object.keys(figures.devices).length
      ? element("p", { class: "headline", "data-program-j": figures.program_j }, data.headline)
      : null,
    element(
      "div",
      { class: "facts" },
      Object.keys(figures.devices).length
        ? deviceTable(data)
        : element(
            "p",
            { class: "missing" },
            "Nothing was measured: no device has a reading. smaragdine doctor says what this machine can measure.",
          ),
      element(
        "div",
        {},
        ...data.traced_lines.map((line) => element("p", { class: "note" }, line)),
        ...figures.notes.map((line) => element("p", { class: "note" }, visible(line))),
      ),
    ),
    epochTable(data),
    regionTable(data),
  );
}

function statusChip(data) {
  const status = data.figures.status;
  const how = data.signal
    ? `${status} by ${data.signal}`
    : status === "failed"
      ? `failed with exit code ${data.exit_code}`
      : status;
  const said = status === "interrupted" ? "interrupted: what was written until then is here" : how;
  return status === "complete" ? null : element("span", { class: "status", "data-status": status }, said);
}

function deviceTable(data) {
  const { figures, host } = data;
  const shown = Object.entries(figures.devices).filter(([, device]) => device.scope !== "part");
  const split = !absent(figures.program_j);
  const program = (energy) =>
    split ? [element("td", { class: "large", "data-program-j": energy }, joules(energy))] : [];
  const line = ([name, device]) =>
    element(
      "tr",
      { "data-device": name, "data-energy-j": device.energy_j },
      element(
        "th",
        { scope: "row" },
        visible(name),
        element("small", {}, visible((host.devices[name] || {}).name || "")),
      ),
      ...program(device.program_j),
      element("td", { class: split ? "" : "large" }, joules(device.energy_j)),
      element("td", {}, watts(device.mean_w)),
      element("td", {}, watts(device.peak_w)),
      element(
        "td",
        { class: "text" },
        element(
          "span",
          { class: "provenance", "data-provenance": device.provenance, title: visible(device.source) },
          device.provenance,
        ),
        device.scope === "whole" ? " not in the sum" : "",
        device.missing_s > 0.0005
          ? element("span", { class: "missing" }, ` ${seconds(device.missing_s)} missing`)
          : "",
      ),
    );
  const adding = shown.filter(([, device]) => device.scope === "device");
  const sum =
    adding.length > 1
      ? [
          element(
            "tr",
            { class: "sum", "data-energy-j": figures.total_j },
            element("th", { scope: "row" }, "sum"),
            ...program(figures.program_j),
            element("td", { class: split ? "" : "large" }, joules(figures.total_j)),
            element("td", {}),
            element("td", {}),
            element(
              "td",
              { class: "text" },
              [...new Set(adding.map(([, device]) => device.provenance))].sort().join(" + "),
            ),
          ),
        ]
      : [];
  return element(
    "table",
    { class: "devices" },
    tableHead(["device", ...(split ? ["program"] : []), "machine", "mean", "peak", "power is"], "text"),
    element("tbody", {}, ...shown.map(line), ...sum),
  );
}

function comparisonHeader(comparison, changes) {
  if (!changes)
    return element("p", { class: "missing" }, `The runs cannot be compared: ${visible(comparison.reason)}.`);
  const all = changes.figures("all");
  const line = (name, change) =>
    element(
      "tr",
      { "data-device": name, "data-difference-j": change.difference_j },
      element("th", { scope: "row" }, visible(name)),
      element("td", {}, joules(change.a_j)),
      element("td", {}, joules(change.b_j)),
      element("td", { class: "large" }, signed(joules(change.difference_j))),
      element("td", {}, joules(change.half_width_j)),
      element("td", { class: "text verdict" }, verdictChip(change.verdict)),
    );
  const said = all.verdict.charAt(0).toUpperCase() + all.verdict.slice(1);
  return element(
    "section",
    { class: "run", "aria-label": "Comparison" },
    element("p", { class: "verdict" }, `${visible(said)}.`),
    element("p", { class: "note" }, visible(all.what)),
    element(
      "div",
      { class: "facts" },
      element(
        "table",
        { class: "devices changes" },
        tableHead(["device", "A", "B", "B − A", all.noise, ""]),
        element(
          "tbody",
          {},
          ...Object.entries(all.devices).map(([name, change]) => line(name, change)),
          ...(Object.keys(all.devices).length > 1 ? [line("all", all.total)] : []),
          line("(idle)", all.idle),
          ...Object.entries(all.unshared).map(([name, change]) => line(`${name}, shared by no operation`, change)),
        ),
      ),
      element("div", {}, ...all.remarks.map((remark) => element("p", { class: "note" }, visible(remark)))),
    ),
  );
}

const verdictChip = (verdict) => element("span", { class: "chip", "data-verdict": verdict }, verdict);

// Of two runs with whose it is; what both have is said once.
function allRemarks(runs) {
  const said = runs.map((run) => remarks(run.data));
  if (runs.length === 1) return said[0];
  const common = said[0].filter((line) => said[1].includes(line));
  const own = said.flatMap((lines, i) =>
    lines.filter((line) => !common.includes(line)).map((line) => `${"AB"[i]}: ${line}`),
  );
  return [...own, ...common.map((line) => `A and B: ${line}`)];
}

function remarks({ figures, levels = {}, absent }) {
  const lines = [
    ...figures.problems,
    ...((figures.tracing || {}).remarks || []),
    ...Object.values(levels)
      .slice(0, 1)
      .flatMap((level) => level.remarks),
    ...Object.entries(levels.traced?.without_power || {}).map(
      ([device, count]) => `${device}: ${plural(count, "event")}, but nobody measured its power`,
    ),
    ...absent.map((gap) => `${gap.channel} absent: ${gap.reason}. Remedy: ${gap.remedy}`),
  ];
  if (figures.missing_s > 0.0005)
    lines.unshift(`${seconds(figures.missing_s)} of ${seconds(figures.duration_s)} have no readings`);
  return lines;
}
