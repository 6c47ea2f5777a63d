"""`smaragdine report`: where the joules of a recording went."""

from __future__ import annotations

import json
import sys

from smaragdine.accounting.overview import overview, overview_json
from smaragdine.cli.parsing import Parser, add_merge_options, count
from smaragdine.recording.reader import open_recording

_EXAMPLE = """\
  smaragdine report runs/2026-11-15-train
  smaragdine report runs/first --summary --top 10 --depth 0
  smaragdine report runs/first --json | jq '.step.devices["gpu:0"].rows[:5]'"""


def main(words: list[str]) -> int:
    parser = Parser(
        "report",
        "Where the energy of a recording went: per device, and per operation of one step. Names, busy times\n"
        "and powers come from the traced steps, length and level of a step from the untraced ones.",
        _EXAMPLE,
    )
    parser.add_argument("recording", metavar="RUN", help="the folder of a recording")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--traced", action="store_true", help="all traced steps as they were, not one step")
    add_merge_options(parser)
    parser.add_argument("--top", metavar="N", type=count, default=15, help="how many names (15)")
    parser.add_argument(
        "--depth", metavar="N", type=count, default=2, help="of the tree of layers (2; 0: none)"
    )
    parser.add_argument(
        "--baseline", metavar="RUN", help="a recording of the idle machine, for the static part of CPU power"
    )
    options = parser.parse_args(words)
    recording = open_recording(options.recording)
    found = overview(recording, open_recording(options.baseline) if options.baseline else None)
    if options.json:
        json.dump(overview_json(found), sys.stdout, indent=1, allow_nan=False)
        print()
        return 0
    shown = found.footprint if options.traced or found.step is None else found.step
    if shown is not None and (options.summary or options.merge):
        from smaragdine.accounting.merge import merge, parse_rule

        shown = merge(shown, [parse_rule(text) for text in options.merge])
    from smaragdine.report.overview import overview_tables
    from smaragdine.report.terminal import console

    out = console()
    out.print(" ".join(recording.info.get("command", [])), style="bold", markup=False, soft_wrap=True)
    out.print(overview_tables(found, shown, options.top, min(options.depth, 100)))
    return 0
