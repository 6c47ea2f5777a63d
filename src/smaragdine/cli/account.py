"""`smaragdine account`: which operation used how much energy."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from smaragdine.accounting.account import account_meters, thinned
from smaragdine.accounting.device_power import DevicePowers, SensorFacts
from smaragdine.accounting.diagram import diagram, zoom
from smaragdine.accounting.footprint import Footprint, save, to_json, write_json
from smaragdine.accounting.precision import Score, score_json
from smaragdine.accounting.run import Run
from smaragdine.cli.parsing import (
    Parser,
    add_merge_options,
    count,
    counts,
    opened_baseline,
    positive_seconds,
    positive_watts,
    print_json,
)
from smaragdine.errors import UserError
from smaragdine.recording.reader import open_recording

_EXAMPLE = r"""  smaragdine account runs/2026-11-15-train
  smaragdine account --events trace.json.gz --power nvidia-smi.csv --tz Europe/Berlin -o footprint.parquet
  smaragdine account --events events.parquet --power power.csv --json - | jq '.devices["gpu:0"].rows[:5]'
  smaragdine account runs/first --summary --tree --zoom bert/encoder"""


def _parser() -> Parser:
    parser = Parser(
        "account",
        "Energy, busy time, mean power and count per operation, from a recording with traced steps, or from\n"
        "any trace and any power log. See docs/events.md for the files that are read.",
        _EXAMPLE,
    )
    parser.usage = "smaragdine account RUN [options] | --events EVENTS --power POWER [options]"
    parser.add_argument("recording", metavar="RUN", nargs="?", help="the folder of a recording")
    parser.add_argument("--events", metavar="EVENTS", help="Parquet, Arrow, CSV, a Chrome trace or XPlane")
    parser.add_argument(
        "--power",
        metavar="POWER",
        help="Parquet, Arrow or CSV (device, t_ns, power_w; duration_ns), or nvidia-smi's CSV",
    )
    parser.add_argument("--json", metavar="FILE", help="write JSON to this file; - is the standard output")
    parser.add_argument(
        "-o", "--output", metavar="FOOTPRINT", help="write the footprint as .parquet, .arrow, .csv or .json"
    )
    show = parser.add_argument_group("what to show")
    add_merge_options(show)
    show.add_argument("--sum", action="store_true", help="add up all devices")
    show.add_argument("--per-step", action="store_true", help="what one step costs")
    show.add_argument("--top", metavar="N", type=count, default=20, help="show so many names (20)")
    show.add_argument("--tree", action="store_true", help="show a tree of layers")
    show.add_argument("--zoom", metavar="PATH", help="show only what is below this path; implies --tree")
    show.add_argument("--depth", metavar="N", type=count, default=3, help="levels of the tree (3)")
    show.add_argument(
        "--thin",
        metavar="K,…",
        type=counts,
        default=[],
        help="also show how alike the footprint stays with every k-th power reading: 2,4,8",
    )
    power = parser.add_argument_group("about the power")
    power.add_argument(
        "--hold-s",
        metavar="S",
        type=positive_seconds,
        help="a longer gap in the log counts as missing (ten times its median spacing)",
    )
    power.add_argument(
        "--tz",
        metavar="ZONE",
        help="zone of nvidia-smi's local times: Europe/Berlin, +02:00 (this machine's)",
    )
    power.add_argument(
        "--idle-w",
        metavar="W",
        type=positive_watts,
        help="the device's idle power, for error bars (half the lowest reading)",
    )
    power.add_argument(
        "--limit-w",
        metavar="W",
        type=positive_watts,
        help="its power limit (the GPU's own, else twice the highest reading)",
    )
    power.add_argument(
        "--window-s",
        metavar="S",
        type=positive_seconds,
        help="the time that one reading averages over (how long a value stays)",
    )
    power.add_argument(
        "--baseline", metavar="RUN", help="a recording of the idle machine: what of the CPU's power is static"
    )
    return parser


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    if options.thin and options.sum:
        raise UserError("--thin works per device", "--sum adds them up", "Leave one of them out")
    events, meters, edges = _inputs(options)
    footprint = account_meters(events, meters)
    precision = thinned(events, meters, options.thin) if options.thin else {}
    if options.summary or options.merge:
        from smaragdine.accounting.merge import merge_edges, parse_rule, renamed, renaming

        names = renaming([footprint], [parse_rule(text) for text in options.merge])
        if edges is not None:
            edges = merge_edges(edges, names)
        footprint = renamed(footprint, names)
    if options.sum:
        from smaragdine.accounting.arithmetic import over_devices

        footprint = over_devices(footprint)
    if options.per_step:
        from smaragdine.accounting.arithmetic import per_step

        footprint = per_step(footprint)
    if options.output is not None:
        save(footprint, options.output)
    if options.json is not None:
        _write_json(footprint, precision, options.json)
    if options.json != "-":
        _print(footprint, edges, options)
        if precision:
            from smaragdine.report.comparison import thinned_table
            from smaragdine.report.terminal import console

            console().print(thinned_table(precision))
    return 0


def _inputs(options: argparse.Namespace) -> tuple[pa.Table, DevicePowers, pa.Table | None]:
    from smaragdine.api import account_inputs

    if options.idle_w and options.limit_w and options.idle_w >= options.limit_w:
        raise UserError("--idle-w is not below --limit-w")
    facts = SensorFacts(options.idle_w, options.limit_w, options.window_s)
    if options.recording is None:
        if not (options.events and options.power):
            raise UserError(
                "nothing to account",
                remedy="Name a recording, or both --events and --power: smaragdine account --help",
            )
        if options.baseline:
            raise UserError(
                "--baseline is for recordings", "a bare power log does not say whose the power was"
            )
        return *account_inputs(options.events, options.power, options.hold_s, options.tz, facts), None
    if options.power or options.hold_s or options.tz:
        raise UserError(
            "--power, --hold-s and --tz are for power logs", f"{options.recording} has power of its own"
        )
    recording = open_recording(options.recording)
    events = _events(options.events) if options.events else None
    baseline = opened_baseline(options.baseline, say=False) if options.baseline else None
    run = Run(recording, baseline, facts)
    inputs = run.inputs if events is None else run.inputs_of(events)
    return *inputs, run.edges if run.edges.num_rows else None


def _events(path: str) -> pa.Table:
    from smaragdine.tracing.files import read_events

    return read_events(path)


def _write_json(footprint: Footprint, precision: Mapping[str, Sequence[Score]], where: str) -> None:
    values = to_json(footprint)
    for device, scores in precision.items():
        values["devices"][device]["thinned"] = [score_json("k", score) for score in scores]
    if where == "-":
        print_json(values)
    else:
        write_json(values, Path(where))


def _print(footprint: Footprint, edges: pa.Table | None, options: argparse.Namespace) -> None:
    from smaragdine.report.tables import diagram_tree, footprint_remarks, footprint_tables, idle_remarks
    from smaragdine.report.terminal import console

    out = console()
    if options.tree or options.zoom:
        node = diagram(footprint, edges)
        out.print(diagram_tree(zoom(node, options.zoom) if options.zoom else node, min(options.depth, 100)))
        for remark in (*idle_remarks(footprint), *footprint_remarks(footprint)):
            out.print(remark)
    else:
        out.print(footprint_tables(footprint, options.top))
