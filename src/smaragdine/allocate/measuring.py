"""Every point of a profile, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smaragdine.allocate.points import Point, load_point, point_name, save_point
from smaragdine.allocate.profiler import Need, Ran, run_point
from smaragdine.allocate.profiling import UPDATES, steps_of, update_period_s
from smaragdine.errors import UserError
from smaragdine.recording.reader import open_recording
from smaragdine.units import seconds

_MOST_VOID = 3


@dataclass(frozen=True)
class Limits:
    """Who sets the device's power limit."""

    apply: Callable[[float], None]
    held: Callable[[], bool]  # whether what was applied has stood since


def measure(
    program: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    batches: Sequence[int],
    limits_w: Sequence[float],
    need: Need,
    blocks: int,
    limits: Limits | None,
    say: Callable[[str], None],
    kept: Callable[[str], None],
) -> list[Point]:
    """Points by rising batch, up to the first that does not fit; those that `folder` has already are not
    measured again. Without `limits` the only one of `limits_w` is what is set. `kept` is told the name of
    each that is in the folder now, also of one that failed."""
    points: list[Point] = []
    count = len(set(batches)) * len(limits_w)
    for batch in sorted(set(batches)):
        for limit_w in limits_w:
            point = load_point(folder, batch, limit_w)
            if point is None:
                say(f"{need.device}: batch {batch} at {limit_w:g} W ({len(points) + 1} of {count})")
                words = [word.replace("{batch}", str(batch)) for word in program]
                try:
                    point = _measured(words, environment, folder, batch, limit_w, need, blocks, limits, say)
                    save_point(folder, point)
                finally:
                    kept(point_name(batch, limit_w))
            points.append(point)
            if point.steps is None:
                # Memory does not depend on the limit, and a larger batch needs more of it.
                say(f"{need.device}: batch {batch} does not fit into memory, so nothing larger is tried")
                return points
    return points


def _measured(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    batch: int,
    limit_w: float,
    need: Need,
    blocks: int,
    limits: Limits | None,
    say: Callable[[str], None],
) -> Point:
    name, at = point_name(batch, limit_w), f"batch {batch} at {limit_w:g} W"
    for _ in range(_MOST_VOID):
        if limits is not None:
            limits.apply(limit_w)
        ran = run_point(words, folder / name, folder / f"{name}.log", environment, need)
        if ran.how == "out_of_memory":
            return Point(batch, limit_w, None)
        if limits is None or limits.held():
            break
        say(f"{need.device}: {limit_w:g} W did not stand, so it runs again")
    else:
        raise UserError(f"{limit_w:g} W does not stand", "something takes the limit back")
    _refuse(ran, at, folder / f"{name}.log", need)
    recording = open_recording(folder / name)
    for line in recording.damage:
        say(f"{at}: {line}")
    steps = steps_of(recording, need.device, need.warm_up, blocks)
    if steps.updates < UPDATES or steps.count < need.steps:
        why = f"the program ended after {steps.count} steps, {steps.updates:.0f} updates of the counter"
        least_s = UPDATES * (update_period_s(recording.channels, need.device) or 0.0)
        least = f"{need.steps} steps and {UPDATES} updates, {seconds(least_s)}"
        remedy = f"Let it run longer: {least} after the first {need.warm_up} steps"
        raise UserError(f"{at} is too short", why, remedy)
    return Point(batch, limit_w, steps)


def _refuse(ran: Ran, at: str, log: Path, need: Need) -> None:
    if ran.how == "failed":
        how = f"signal {-ran.returncode}" if ran.returncode < 0 else f"exit code {ran.returncode}"
        raise UserError(f"{at}: the program failed with {how}", ran.said, f"See {log}")
    if not ran.steps:
        why = f"none came in {need.patience_s:g} s" if ran.how == "stuck" else "the program announced none"
        remedy = 'Put smaragdine.mark("step_end", n) after each step'
        raise UserError(f"{at}: no steps were seen", why, remedy)
    if ran.how == "stuck":
        raise UserError(
            f"{at}: no step for {need.patience_s:g} s", ran.said, f"See {log}, or raise --patience"
        )
