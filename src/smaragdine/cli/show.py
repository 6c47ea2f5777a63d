"""`smaragdine show`: a recording at a glance."""

from __future__ import annotations

import json
import sys

from smaragdine.accounting.baseline import subtract
from smaragdine.accounting.run import Run
from smaragdine.accounting.summary import to_json
from smaragdine.cli.parsing import Parser, grams_per_kwh, opened_baseline
from smaragdine.errors import visible
from smaragdine.units import carbon_g


def main(words: list[str]) -> int:
    parser = Parser(
        "show",
        "What the program used, and energy, mean and peak power per device and per epoch of a recording.",
        "  smaragdine show runs/2026-11-15-train\n"
        "  smaragdine show runs/first --carbon 380\n"
        "  smaragdine show runs/first --json | jq .devices",
    )
    parser.add_argument("recording", metavar="RUN", help="the folder of a recording")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--subtract", metavar="BASELINE", help="also show energy above an idle baseline")
    parser.add_argument(
        "--carbon",
        metavar="G",
        type=grams_per_kwh,
        help="also show CO₂, at so many grams per kWh: your grid's, which changes by place, hour and year",
    )
    options = parser.parse_args(words)
    run = Run.open(options.recording)
    summary = run.summary
    idle = opened_baseline(options.subtract, say=False) if options.subtract else None
    net = subtract(summary, idle.summary) if idle is not None else []
    said = idle.idle_machine.remarks if idle is not None else ()
    if options.json:
        values = to_json(summary)
        if options.subtract:
            values["above_idle"] = {row.device: {"net_j": row.net_j, "idle_w": row.idle_w} for row in net}
            values["problems"] = [*summary.problems, *said]
        if options.carbon is not None:
            values["carbon"] = {
                "program_g": _grams(summary.program_j, options.carbon),
                "total_g": _grams(summary.total_j, options.carbon),
                "intensity_g_per_kwh": options.carbon,
            }
        json.dump(values, sys.stdout, indent=1, allow_nan=False)
        print()
        return 0
    from smaragdine.report.terminal import carbon_line, console, run_tables

    out = console()
    command = visible(" ".join(run.info.get("command", [])))
    out.print(command, style="bold", markup=False, soft_wrap=True)
    out.print(run_tables(summary, net, idle=run.is_baseline))
    for line in said:
        out.print(f"! {visible(line)}", markup=False, soft_wrap=True)
    if options.carbon is not None:
        out.print(carbon_line(summary, options.carbon))
    return 0


def _grams(energy_j: float | None, intensity_g_per_kwh: float) -> float | None:
    return None if energy_j is None else carbon_g(energy_j, intensity_g_per_kwh)
