"""`smaragdine calibrate`: replays a run's operations one by one, to know what each draws."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from smaragdine.cli.parsing import Parser, opened
from smaragdine.cli.recorded import DEFAULT_BUDGET_S, calibrate_run
from smaragdine.errors import UserError, visible

if TYPE_CHECKING:
    from smaragdine.calibrate.store import Store

_EXAMPLE = """\
  smaragdine calibrate runs/2026-11-19-train               # some minutes, on the GPU that the run used
  smaragdine calibrate runs/2026-11-19-train --budget 1min # the largest calls alone
  smaragdine calibrate --list                              # what is known of which card
  smaragdine calibrate --forget GPU-2d549b0d-0e9f-928a-86d1-b09483d9366d
"""
_BUDGET = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h|)")
_UNITS_S = {"s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0}


def main(words: list[str]) -> int:
    parser = Parser(
        "calibrate",
        "Replay the operations of a recording one by one on the GPU that it was made on, and measure what\n"
        "each draws. From then on the rows of `smaragdine report RUN` rest on it, and not on equal shares.\n"
        "What is known of a card is kept: another run replays only what is new.",
        _EXAMPLE,
    )
    parser.add_argument("recording", nargs="?", metavar="RUN", help="the recording's folder")
    parser.add_argument(
        "--budget",
        type=budget_s,
        default=DEFAULT_BUDGET_S,
        metavar="TIME",
        help="replay for at most so long, the largest operations first (default 10min)",
    )
    parser.add_argument(
        "--python", metavar="PATH", help="the program's interpreter (default the recorded one)"
    )
    parser.add_argument(
        "--store", metavar="DIR", help="where replays are kept (default ~/.cache/smaragdine/calibration)"
    )
    parser.add_argument("--no-replay", action="store_true", help="use what is known, and replay nothing")
    parser.add_argument("--list", action="store_true", help="say what is known of which card")
    parser.add_argument("--forget", metavar="CARD", help="forget what is known of a card")
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(words)
    from smaragdine.calibrate.store import Store, default_folder

    store = Store(Path(options.store) if options.store else default_folder())
    asked = sum([options.recording is not None, options.list, options.forget is not None])
    if asked != 1:
        what = "name a recording, or one of --list and --forget"
        raise UserError(
            f"{what}, and no two of them" if asked else what, remedy="smaragdine calibrate --help"
        )
    if options.list:
        return _list(store, options.json)
    if options.forget is not None:
        card = store.named(options.forget)
        if not store.forget(card):
            raise UserError(f"nothing is known of {card}", remedy="smaragdine calibrate --list")
        print(json.dumps({"forgotten": card}) if options.json else f"forgotten: {visible(card)}")
        return 0
    return _calibrate(options, store)


def budget_s(word: str) -> float:
    match = _BUDGET.fullmatch(word)
    if not match or not 0 < (seconds := float(match[1]) * _UNITS_S[match[2]]) <= 86400:
        raise argparse.ArgumentTypeError(f"{word} is no time: 90s, 5min, 1h")
    return seconds


def _calibrate(options: argparse.Namespace, store: Store) -> int:
    run = opened(options.recording)
    return calibrate_run(
        run, store, options.budget, options.python, replay=not options.no_replay, as_json=options.json
    )


def _list(store: Store, as_json: bool) -> int:
    cards = store.cards()
    if as_json:
        known = {card: [dataclasses.asdict(each) for each in replays] for card, replays in cards.items()}
        print(json.dumps(known, indent=2))
        return 0
    for line in store.damage():
        print(f"smaragdine: {visible(line)}", file=sys.stderr)
    if not cards:
        print(f"no card is known: nothing was calibrated ({store.folder})")
    for card, replays in cards.items():
        done = [each for each in replays if each.cold or each.hot]
        libraries = ", ".join(
            [
                *sorted({each.library for each in replays}),
                *sorted({f"driver {each.driver}" for each in replays}),
            ]
        )
        print(f"{card}  {visible(replays[0].name)}  {len(done)} calls  ({visible(libraries)})")
    return 0
