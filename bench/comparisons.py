"""Measures how often a comparison claims a change that is none, and how often it finds a real one.

    python bench/comparisons.py [--pairs 200] [--first 0] [--only "processor, fickle"]

The programs run in simulated time (tests/simulated_runs.py). The real writer records them, and they are
read, accounted and compared as `smaragdine compare A1 A2 A3 --against B1 B2 B3` does it: training on a GPU,
on a processor, and on a processor beside a neighbour that keeps some of its CPUs busy. A steady neighbour
keeps the same number busy in all runs; a fickle one another number from moment to moment and from run to
run. Every pair is a program of its own.

First, equal programs, three runs against three: how many pairs claim any change at all (`any`: of the sum, of
idle time, of a device, of one name), and which claim it is; `layers`: any claim with --by layer; `unknown`:
beside neighbours that differ too much to tell.

Then one layer has 10 % more to do (it takes 10 % longer, at the same power): how many pairs find it. Found
means that with --by layer this layer takes more (`layer`), that one of its names does (`a name`), or that
names with half of its energy do (`half`). `wrong`: of all names said to have changed, those of other
layers.

Last, one run against one: how many pairs claim anything.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from simulated_runs import Neighbour, layer_of, three_sides
from smaragdine.accounting.comparison import Change, Comparison, compare
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.intervals import grouped

SETTINGS: dict[str, tuple[str, Neighbour]] = {
    "GPU": ("gpu:0", "none"),
    "processor": ("cpu:0", "none"),
    "processor, steady": ("cpu:0", "steady"),
    "processor, fickle": ("cpu:0", "fickle"),
}
CLAIMS = ("more", "less")


@dataclass(frozen=True)
class Outcome:
    """What the comparisons of one program said."""

    changed: bool  # three equal runs against three
    by_sum: bool
    by_idle: bool
    by_name: bool
    by_layer: bool  # with --by layer, a claim about a layer
    unknown: bool  # the verdict, because of the neighbour
    found_layer: bool
    found_name: bool
    found_half: bool
    wrong: int
    names: int  # that were said to have changed
    single_equal: bool  # one run against one: a claim
    single_wider: bool


def judge(seed: int, a: list[Footprint], b: list[Footprint], c: list[Footprint]) -> Outcome:
    equal, other = compare(a, b), compare(a, c)
    layers = [compare(_by_layer(a), _by_layer(side)) for side in (b, c)]
    inside = f"/{layer_of(seed)}/"
    more = [change for change in other.changes if change.verdict in CLAIMS]
    of_layer = [change for change in other.changes if inside in change.name]
    found_j = sum(change.a_j for change in of_layer if change.verdict == "more")
    return Outcome(
        changed=claims(equal),
        by_sum=equal.total.verdict in CLAIMS,
        by_idle=equal.idle.verdict in CLAIMS,
        by_name=_any(equal.changes),
        by_layer=_any(layers[0].changes),
        unknown=equal.total.verdict == "unknown",
        found_layer=any(
            change.verdict == "more" for change in layers[1].changes if f"{change.name}/".endswith(inside)
        ),
        found_name=found_j > 0,
        found_half=found_j >= 0.5 * sum(change.a_j for change in of_layer),
        wrong=sum(inside not in change.name for change in more),
        names=len(more),
        single_equal=claims(compare(a[:1], b[:1])),
        single_wider=claims(compare(a[:1], c[:1])),
    )


def claims(found: Comparison) -> bool:
    return _any([found.total, found.idle, *found.devices, *found.changes]) or bool(
        found.only_a or found.only_b
    )


def _any(changes: Sequence[Change]) -> bool:
    return any(change.verdict in CLAIMS for change in changes)


def _by_layer(side: Sequence[Footprint]) -> list[Footprint]:
    return [grouped(run, "layer", 2) for run in side]


def one_pair(seed: int, device: str, neighbour: Neighbour) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return judge(seed, *three_sides(seed, device, neighbour, Path(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="number of the first program; another number gives other programs",
    )
    parser.add_argument("--only", choices=SETTINGS)
    options = parser.parse_args()
    programs = range(options.first, options.first + options.pairs)
    print(" " * 21 + "|  equal, 3 against 3                      |  one layer +10 %                | 1 to 1")
    print(
        " " * 21
        + "|   any   sum  idle names layers  unknown  | layer  a name    half    wrong  | equal +10 %"
    )
    with ProcessPoolExecutor() as pool:
        for setting, (device, neighbour) in SETTINGS.items():
            if options.only not in (None, setting):
                continue
            done = list(
                pool.map(partial(one_pair, device=device, neighbour=neighbour), programs, chunksize=5)
            )

            def part(name: str, done: Sequence[Outcome] = done) -> str:
                return f"{sum(getattr(one, name) for one in done) / len(done):.1%}"

            wrong = sum(one.wrong for one in done)
            print(
                f"{setting:21}|{part('changed'):>6}{part('by_sum'):>6}{part('by_idle'):>6}{part('by_name'):>6}"
                f"{part('by_layer'):>7}{part('unknown'):>9}  |{part('found_layer'):>6}{part('found_name'):>8}"
                f"{part('found_half'):>8}{wrong / max(sum(one.names for one in done), 1):>9.1%}  |"
                f"{part('single_equal'):>6}{part('single_wider'):>7}",
                flush=True,
            )


if __name__ == "__main__":
    main()
