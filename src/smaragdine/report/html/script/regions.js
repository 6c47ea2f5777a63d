// What the program named itself: all times together.

function regionTable({ regions }) {
  if (!regions.count || !regions.devices.length) return null;
  const split = regions.rows.some((region) => !absent(region.program_j));
  const line = (region) =>
    element(
      "tr",
      { "data-region": region.name },
      element("th", { scope: "row", title: visible(region.name) }, visible(region.name)),
      element("td", { "data-times": region.times }, String(region.times)),
      element("td", { "data-s": region.duration_s }, seconds(region.duration_s)),
      split ? element("td", { "data-program-j": region.program_j }, joules(region.program_j)) : null,
      ...regions.devices.map((name) => {
        const energy = region.energy_j[name];
        return element("td", { "data-device": name, "data-energy-j": energy }, joules(energy));
      }),
    );
  const more = regions.count - regions.rows.length;
  return element(
    "details",
    { class: "spans regions" },
    element("summary", {}, plural(regions.count, "region")),
    element(
      "table",
      { class: "devices" },
      tableHead([
        "region",
        "times",
        "time",
        ...(split ? ["program"] : []),
        ...regions.devices.map((name) => `all ${visible(name)}`),
      ]),
      element("tbody", {}, ...regions.rows.map(line)),
    ),
    more ? element("p", { class: "note" }, `${plural(more, "more region")}: smaragdine show --json`) : null,
  );
}
