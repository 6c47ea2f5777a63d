"""What sampling costs the program, in time and in energy.

Time: seconds a step with the recorder beside the program ÷ without, pair by pair of blocks. Energy: the same
of a device with a counter, joules a step. Where power is estimated there is no counter to see a difference
by: what stands there is the monitor's own energy as a part of the program's, estimated as well.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smaragdine.accounting.footprint import write_json
from smaragdine.accounting.ratios import alternating_interval, mean_interval, ratio_interval
from smaragdine.errors import UserError
from smaragdine.files import read_json
from smaragdine.study.overhead_blocks import SCRATCH, Block, Measured, Stopped, measure_blocks
from smaragdine.study.results import hardware_of
from smaragdine.study.settings import Setting

OVERHEAD = "overhead.json"
BLOCK_S = 2.0
_FORMAT = 1


@dataclass(frozen=True)
class Cost:
    """How much more, as a part of what it is without: 0.01 is one per cent. With the 95 % interval."""

    low: float
    middle: float
    high: float
    provenance: str = "measured"


@dataclass(frozen=True)
class Overhead:
    setting: str
    pairs: int
    block_s: float
    step_s: float  # without the recorder
    time: Cost  # the mean over pairs
    time_median: Cost  # a pair in which somebody else took the machine moves nothing
    energy: Mapping[str, Cost]  # device → of a step
    core_share: float  # of one core, the recorder's
    hardware: str
    remarks: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = field(default=(), repr=False)


def measure_overhead(
    setting: Setting,
    out: Path,
    say: Callable[[str], None],
    stop: object,  # true once the user wants no more
    pairs: int = 20,
    block_s: float = BLOCK_S,
) -> Overhead | None:
    """Into OUT/overhead.json; what is there already is not measured again. None where `stop` became true, and
    where the program cannot run bare."""
    # Whole rounds of ABBA: half a one would let a drift through.
    pairs = max(2, pairs + pairs % 2)
    known = {each.setting: each for each in load_overhead(out)}
    if setting.name in known and known[setting.name].pairs >= pairs:
        return known[setting.name]
    if setting.facts.get("framework") == "tf1":
        say(f"overhead of {setting.name}: not measured, its program records itself by a session hook")
        return None
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob(f"{SCRATCH}*"):  # by a process that was killed
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
    try:
        measured = measure_blocks(setting, out, pairs, block_s, say, lambda: bool(stop))
    except Stopped:
        return None
    found = overhead_of(setting.name, measured)
    known[setting.name] = found
    values = {name: asdict(each) for name, each in sorted(known.items())}
    write_json({"format_version": _FORMAT, "settings": values}, out / OVERHEAD)
    return found


def load_overhead(out: Path) -> list[Overhead]:
    """Of every setting that it was measured of."""
    path = out / OVERHEAD
    if not path.is_file():
        return []
    try:
        values = read_json(path)
        if int(values["format_version"]) > _FORMAT:
            raise UserError(f"{path} is of a newer version of Smaragdine", remedy="Upgrade it")
        return [_from_dict(each) for each in values["settings"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read", str(error), "Remove it: it is measured again") from None


def overhead_of(setting: str, measured: Measured) -> Overhead:
    blocks = measured.blocks
    with_it, without = pairs_of(blocks)
    times = [b.step_s for b in with_it], [b.step_s for b in without]
    return Overhead(
        setting=setting,
        pairs=len(with_it),
        block_s=measured.block_s,
        step_s=statistics.median(times[1]),
        time=_cost(alternating_interval(*times)),
        time_median=_cost(ratio_interval(*times)),
        energy=_energy(with_it, without),
        core_share=statistics.median([b.core_share for b in with_it if b.core_share is not None] or [0.0]),
        hardware=hardware_of(measured.last),
        remarks=tuple(_remarks(measured)),
        blocks=tuple(blocks),
    )


def pairs_of(blocks: Sequence[Block]) -> tuple[list[Block], list[Block]]:
    """Each pair's block with the recorder, and the one without."""
    pairs = list(zip(blocks[::2], blocks[1::2], strict=True))
    if any(a.recorded == b.recorded for a, b in pairs):
        raise ValueError("a pair has a block of each kind")
    return [a if a.recorded else b for a, b in pairs], [b if a.recorded else a for a, b in pairs]


def _energy(with_it: Sequence[Block], without: Sequence[Block]) -> dict[str, Cost]:
    found: dict[str, Cost] = {}
    measured = set(with_it[0].power_w).intersection(*(b.power_w for b in (*with_it, *without)))
    for device in sorted(measured):
        step_j = [[b.power_w[device] * b.step_s for b in kind] for kind in (with_it, without)]
        found[device] = _cost(alternating_interval(*step_j))
    estimated = set(with_it[0].monitor_part).intersection(*(b.monitor_part for b in with_it)) - measured
    for device in sorted(estimated):
        low, middle, high = mean_interval([b.monitor_part[device] for b in with_it])
        found[device] = Cost(max(low, 0.0), middle, high, "estimated")
    return found


def _cost(ratio: tuple[float, float, float]) -> Cost:
    low, middle, high = ratio
    return Cost(low - 1, middle - 1, high - 1)


def _remarks(measured: Measured) -> list[str]:
    found: list[str] = []
    pairs = len(measured.blocks) / 2
    for device, stamp_s in sorted(measured.stamp_s.items()):
        one = stamp_s / measured.block_s
        found.append(
            f"{device}: its counter's steps are timed to {stamp_s * 1e3:.1f} ms at worst, {one:.2%} of a "
            f"block and {one * math.sqrt(2 / pairs):.2%} of the mean over {pairs:.0f} pairs"
        )
    if any(block.monitor_part for block in measured.blocks):
        found.append("estimated: the monitor's own energy as a part of the program's")
    return found


def _from_dict(values: dict[str, Any]) -> Overhead:
    values = dict(values)
    for name in ("time", "time_median"):
        values[name] = Cost(**values[name])
    values["energy"] = {device: Cost(**cost) for device, cost in values["energy"].items()}
    values["remarks"] = tuple(values["remarks"])
    values["blocks"] = tuple(Block(**block) for block in values["blocks"])
    return Overhead(**values)
