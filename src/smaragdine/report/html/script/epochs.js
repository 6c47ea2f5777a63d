// What each epoch took, on request: some trainings have a thousand.

function epochTable({ epochs }) {
  const times = Array.from(epochs.start_ns, (start, i) => (epochs.end_ns[i] - start) / 1e9);
  const devices = Object.entries(epochs.energy_j);
  if (!times.length || !devices.length) return null;
  const program = Array.from(epochs.program_j);
  const split = program.some((value) => !absent(value));
  const line = (time, i) =>
    element(
      "tr",
      { "data-epoch": epochs.index[i] ?? "?" },
      element("th", { scope: "row" }, String(epochs.index[i] ?? "?")),
      element("td", { "data-s": time }, seconds(time)),
      split ? element("td", { "data-program-j": program[i] }, joules(program[i])) : null,
      ...devices.map(([name, energies]) =>
        element(
          "td",
          { "data-device": name, "data-energy-j": absent(energies[i]) ? null : energies[i] },
          joules(energies[i]),
        ),
      ),
    );
  const mean = [
    meanText(times, "s"),
    ...(split ? [meanText(program.filter((value) => !absent(value)), "J")] : []),
    ...devices.map(([, energies]) => meanText(Array.from(energies).filter((value) => !absent(value)), "J")),
  ];
  const sums = times.map((_, i) => devices.reduce((sum, [, energies]) => sum + energies[i], 0));
  const used = split ? program : sums;
  const each = [mean[0], ...(used.some(absent) ? [] : [meanText(used, "J")])].join(" and ");
  const whose = split ? " for your program" : " for the machine";
  const more = epochs.count - times.length;
  return element(
    "details",
    { class: "spans epochs" },
    element("summary", {}, `${plural(epochs.count, "epoch")}: ${each}${times.length > 1 ? " each" : ""}${used.some(absent) ? "" : whose}`),
    element(
      "table",
      { class: "devices" },
      tableHead([
        "epoch",
        "time",
        ...(split ? ["program"] : []),
        ...devices.map(([name]) => `all ${visible(name)}`),
      ]),
      element(
        "tbody",
        {},
        ...times.map(line),
        times.length > 1
          ? element(
              "tr",
              { class: "sum" },
              element("th", { scope: "row" }, `mean of ${times.length}`),
              ...mean.map((text) => element("td", {}, text)),
            )
          : null,
      ),
    ),
    more ? element("p", { class: "note" }, `${plural(more, "more epoch")}: smaragdine show --json`) : null,
  );
}

// With the standard deviation, where there is one.
function meanText(values, unit) {
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  if (values.length < 2) return si(mean, unit);
  const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return plusMinus(mean, Math.sqrt(squares / (values.length - 1)), unit);
}
