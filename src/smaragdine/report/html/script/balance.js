// Rows + idle = total, as a bar and in figures.
function drawBalance(view) {
  const box = at("balance");
  box.hidden = !view || view.kind !== "run";
  if (box.hidden) return;
  const { rows_j, idle_j, total_j } = conservation(view.run, view.level, view.device);
  const whole =
    view.phase === "all"
      ? view
      : view.run.view({ ...state, level: view.level, device: view.device, phase: "all" });
  const parts = [...whole.phases(), ["idle", idle_j]].filter(([, energy]) => energy > 0);
  const shade = { forward: 0.5, backward: 0.95, optimizer: 0.72, idle: 0.04 };
  const bar = element(
    "div",
    { class: "stack", "aria-hidden": "true" },
    ...parts.map(([name, energy]) => {
      const { fill, ink } = colour(shade[name] ?? 0.3);
      const piece = element(
        "span",
        { title: `${name} ${joules(energy)}`, "data-phase": name },
        energy > 0.06 * total_j ? `${visible(name)} ${percent(energy / total_j)}` : "",
      );
      piece.style.flexGrow = energy / total_j;
      piece.style.backgroundColor = fill;
      piece.style.color = ink;
      return piece;
    }),
  );
  const untraced = Object.keys(view.run.data.figures.untraced_step);
  const known = view.device === "all" ? untraced.length > 0 : untraced.includes(view.device);
  const of = view.level !== "step" ? "All traced" : known ? "One step" : "One traced step";
  box.replaceChildren(
    element(
      "p",
      {},
      element("strong", {}, `${of}, ${view.device === "all" ? "all devices" : visible(view.device)}: `),
      element(
        "span",
        { "data-rows-j": rows_j, "data-idle-j": idle_j, "data-total-j": total_j },
        `operations ${si(rows_j, "J", 4)} + idle ${si(idle_j, "J", 4)} = ${si(total_j, "J", 4)}`,
      ),
      untracedText(view),
      Math.abs(rows_j + idle_j - total_j) > 1e-6 * total_j
        ? element("span", { class: "missing" }, "  ·  this does not add up")
        : "",
    ),
    bar,
  );
}

function untracedText(view) {
  if (view.level !== "step") return "";
  const steps = Object.entries(view.run.data.figures.untraced_step).filter(
    ([name]) => view.device === name || (view.device === "all" && name.startsWith("gpu")),
  );
  return steps
    .map(
      ([name, step]) =>
        `  ·  ${visible(name)} ${percent(Math.min(step.busy_s / step.length_s, 1), 0.2)} busy in ${seconds(step.length_s)}`,
    )
    .join("");
}
