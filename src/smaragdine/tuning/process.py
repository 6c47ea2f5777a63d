"""The tuner's process: `python -m smaragdine.tuning.process`, beside the program and never in its way.

Options are JSON in its argument. Its messages (see messages.py):

    out  {"ready": {}} or {"refused": why}
    in   {"follow": SPOOL}          the marks of the program to tune; then stdin stays open until the end
    out  {"done": {…}}              what came of it, once limits are as they were before

It ends with its stdin, and with whoever started it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from smaragdine.errors import UserError
from smaragdine.jobs.lender import Lender, devices_here, lender, ranges_here, try_all, wanted_limits
from smaragdine.jobs.setting import Setting
from smaragdine.limits.nvml import LimitError, LimitRange
from smaragdine.messages import Child, Inbox, module_command, send
from smaragdine.sensors.nvml.gpus import nvml
from smaragdine.tuning.policy import Kind, Mean, Policy, Search, Seen, TuneObjective, log_ratio
from smaragdine.tuning.tuner import SliceOptions, Tuner, Wait, live_energy

# What came of it: the limits, what they save, what trying them cost. Plain numbers, for a file as JSON.


@dataclass(frozen=True)
class PartSaved:
    """A part of one with its 95 % interval: 0.12 [0.10, 0.14]."""

    part: float
    low: float
    high: float


@dataclass(frozen=True)
class Tried:
    """A step at one limit. Intervals are half-widths, 95 %."""

    limit_w: float
    slices: int
    steps: int
    time_s: float
    time_interval_s: float
    energy_j: float
    energy_interval_j: float
    power_w: float
    value: float  # of the objective
    value_interval: float


@dataclass(frozen=True)
class Searched:
    why: str
    chosen_w: float | None  # None: the program ended, or limits were lost, before it was settled
    rounds: int
    tried: tuple[Tried, ...]  # from the highest limit down
    saved: PartSaved | None  # energy per step, against the limit before
    slower: PartSaved | None  # time per step
    trying_s: float
    trying_extra_j: float | None  # what its steps used more than at the chosen limit; negative: less
    trying_extra_s: float | None
    settled_steps: int
    settled_s: float


@dataclass(frozen=True)
class TuneOutcome:
    objective: dict[str, Any]
    devices: tuple[str, ...]
    reference_w: float
    limits_w: tuple[float, ...]
    searches: tuple[Searched, ...] = ()
    saved_j: float | None = None  # by all steps since tuning began, estimated from the slices
    problem: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def chosen_w(self) -> float | None:
        """The last limit it settled on."""
        return next((each.chosen_w for each in reversed(self.searches) if each.chosen_w is not None), None)


def outcome(
    policy: Policy, devices: tuple[str, ...], problem: str = "", notes: tuple[str, ...] = ()
) -> TuneOutcome:
    searches = tuple(_searched(policy, search) for search in policy.searches if search.seen)
    saved = [_saved_j(policy, search) for search in policy.searches if policy.reference_w in search.seen]
    return TuneOutcome(
        asdict(policy.objective),
        devices,
        policy.reference_w,
        tuple(policy.limits_w),
        searches,
        math.fsum(saved) if saved else None,
        problem,
        notes,
    )


def outcome_from(values: Any) -> TuneOutcome:
    """As `asdict` and JSON left it."""
    import msgspec

    return msgspec.convert(values, TuneOutcome)


def _searched(policy: Policy, search: Search) -> Searched:
    seen = search.seen
    chosen = seen[search.chosen_w] if search.chosen_w is not None else None
    reference = seen.get(policy.reference_w)
    saved = slower = extra_j = extra_s = None
    if chosen is not None:
        extra_j = _extra(seen, "energy_j", chosen.energy_j)
        extra_s = _extra(seen, "time_s", chosen.time_s)
        if reference is not None and reference is not chosen:
            saved = _saved(chosen.energy_j, reference.energy_j)
            slower = _slower(chosen.time_s, reference.time_s)
    tried = tuple(_tried(seen[limit_w]) for limit_w in sorted(seen, reverse=True))
    return Searched(
        search.why,
        search.chosen_w,
        search.rounds,
        tried,
        saved,
        slower,
        search.tried_s,
        extra_j,
        extra_s,
        search.settled_steps,
        search.settled_s,
    )


def _tried(seen: Seen) -> Tried:
    return Tried(
        seen.limit_w,
        len(seen.slices),
        seen.steps,
        seen.time_s.value,
        seen.time_s.half_width(),
        seen.energy_j.value,
        seen.energy_j.half_width(),
        seen.power_w.value,
        seen.value.value,
        seen.value.half_width(),
    )


def _extra(seen: dict[float, Seen], name: str, chosen: Mean) -> float:
    """Of all steps while limits were tried; those dropped while a limit settled count as the others do."""
    return math.fsum(each.steps * (getattr(each, name).value - chosen.value) for each in seen.values())


def _saved(chosen: Mean, reference: Mean) -> PartSaved:
    ratio = log_ratio(chosen, reference)
    half = ratio.half_width()
    part, low, high = (1 - math.exp(ratio.value + by) for by in (0, half, -half))
    return PartSaved(part, low, high)


def _slower(chosen: Mean, reference: Mean) -> PartSaved:
    ratio = log_ratio(chosen, reference)
    half = ratio.half_width()
    part, low, high = (math.exp(ratio.value + by) - 1 for by in (0, -half, half))
    return PartSaved(part, low, high)


def _saved_j(policy: Policy, search: Search) -> float:
    """Against the limit before: settled steps, and those of the slices, which may have cost more."""
    reference_j = search.seen[policy.reference_w].energy_j.value
    tried = [each.steps * (reference_j - each.energy_j.value) for each in search.seen.values()]
    if search.chosen_w is None:
        return math.fsum(tried)
    chosen_j = search.seen[search.chosen_w].energy_j.value
    return math.fsum([*tried, search.settled_steps * (reference_j - chosen_j)])


# What is tuned: which devices, which limits, towards what.

_MOST_LIMITS = 8
_ROUND_W = 5.0


@dataclass(frozen=True)
class TuneOptions:
    """What a user may choose."""

    power_w: tuple[float, ...] = ()  # none: even steps of the devices' range
    objective: Kind = "energy"
    eta: float = 0.5
    slowdown: float | None = None
    devices: tuple[str, ...] = ()  # none: those the program sees
    steps: int = 20
    settle_s: float = 0.5
    skip: int = 10
    trying: float = 0.1


@dataclass(frozen=True)
class Setup:
    devices: Mapping[str, str]  # name → UUID
    limits_w: tuple[float, ...]
    reference_w: float  # what is set now
    highest_w: float  # of all devices together, for the objective `cost`

    def policy(self, options: TuneOptions) -> Policy:
        objective = TuneObjective(options.objective, options.eta, self.highest_w, options.slowdown)
        return Policy(self.limits_w, self.reference_w, objective, options.trying)


def find_setup(options: TuneOptions, environment: Mapping[str, str]) -> Setup:
    """Asks the driver and changes nothing. Refuses what a device does not allow."""
    devices = devices_here(options.devices, environment)
    if not devices:
        raise UserError("no GPU whose power limit could be tuned", "none was found", "See smaragdine doctor")
    ranges = [each for each in ranges_here() if each.kind == "power" and each.device in devices]
    if len(ranges) < len(devices):
        without = next(device for device in devices if device not in {each.device for each in ranges})
        raise UserError(
            f"{without} has no power limit to set", remedy="Name other devices: --devices gpu:0,…"
        )
    reference_w = min(each.current.value if each.current is not None else each.highest for each in ranges)
    limits_w = options.power_w or even_limits(ranges, reference_w)
    for limit_w in limits_w:
        wanted_limits(Setting("power", power_limit_w=limit_w), list(devices), ranges)
    if not set(limits_w) - {reference_w}:
        why = f"{reference_w:g} W is set, and no other limit is asked for or allowed"
        raise UserError("nothing to tune", why, "Name limits: --power 150,200,250")
    return Setup(devices, tuple(limits_w), reference_w, sum(each.highest for each in ranges))


def even_limits(ranges: Sequence[LimitRange], reference_w: float) -> tuple[float, ...]:
    """From what is set now, which an administrator may have lowered, down to the lowest that all allow."""
    lowest_w = max(each.lowest for each in ranges)
    step_w = max(_ROUND_W, _ROUND_W * -(-(reference_w - lowest_w) // (_ROUND_W * (_MOST_LIMITS - 1))))
    limits_w = [reference_w]
    while limits_w[-1] - step_w >= lowest_w:
        limits_w.append(limits_w[-1] - step_w)
    if limits_w[-1] - lowest_w >= step_w / 2:
        limits_w.append(lowest_w)
    return tuple(limits_w)


def check_permission(lender: Lender, setup: Setup) -> None:
    """Before anything runs: whether limits may be set at all. The one that is set already is set again."""
    setting = Setting("power", power_limit_w=setup.reference_w)
    try_all(lender, [wanted_limits(setting, list(setup.devices), ranges_here())])


def refusal(error: UserError) -> str:
    """One line, with the way out where it is a matter of permission."""
    denied = isinstance(error, LimitError) and (
        error.code == "denied" or (error.code == "unavailable" and os.geteuid() != 0)
    )
    if not denied:
        return str(error)
    why = "the NVIDIA driver lets only root with CAP_SYS_ADMIN do that"
    remedy = "Run it as root, or have root run smaragdine daemon --control-group with a group of yours"
    return str(UserError("limits cannot be set", why, remedy))


OUTCOME_FILE = "tune.json"  # of a recording
TUNED_VARIABLE = "SMARAGDINE_TUNED"  # set in a program whose limits are being tuned
_END_TIMEOUT_S = 15.0


class TunerClient:
    """A running tuner. Raises `UserError` where limits cannot be tuned; its later death is only reported."""

    def __init__(self, options: TuneOptions, environment: Mapping[str, str]) -> None:
        command = module_command("smaragdine.tuning.process", json.dumps(asdict(options)))
        # A session of its own: what is meant for the terminal's programs does not reach it.
        self._child = Child(command, env=dict(environment), start_new_session=True)
        self.pid = self._child.pid
        answer = self._child.receive() or {}
        if "ready" not in answer:
            self._child.end(_END_TIMEOUT_S)
            raise UserError(answer.get("refused") or "the tuner does not start")

    def follow(self, spool: str | os.PathLike[str]) -> None:
        """Tune the program whose marks come into this folder."""
        self._child.send({"follow": os.path.abspath(spool)})

    def finish(self) -> TuneOutcome | None:
        """Have all limits brought back; what came of it, or None where the tuner has died."""
        self._child.hang_up()
        answer = self._child.receive(_END_TIMEOUT_S) or {}
        self._child.end(_END_TIMEOUT_S)  # killed or not: its keeper brings limits back
        return outcome_from(answer["done"]) if "done" in answer else None


def save_outcome(folder: Path, found: TuneOutcome) -> None:
    """Into the recording. A full disk loses the file, not the run."""
    with contextlib.suppress(OSError):
        (folder / OUTCOME_FILE).write_text(json.dumps(asdict(found), indent=1) + "\n")


_MOST_NOTES = 20


def main() -> int:
    wait = _until_end()
    options = msgspec.json.decode(sys.argv[1], type=TuneOptions)
    try:
        found = _tune(options, wait)
    except UserError as error:
        send(1, {"refused": refusal(error)})
        return 2
    except nvml().NVMLError as error:
        send(1, {"refused": str(UserError("no GPU answers", str(error), "See smaragdine doctor"))})
        return 2
    while not wait(60.0):
        pass
    if found is not None:
        send(1, {"done": asdict(found)})
    return 0


def _tune(options: TuneOptions, wait: Wait) -> TuneOutcome | None:
    """Until the end or a problem; then all limits are as before."""
    notes: list[str] = []
    setup = find_setup(options, os.environ)
    devices = tuple(setup.devices)
    policy = setup.policy(options)
    with lender(notes.append) as limits:
        check_permission(limits, setup)
        with live_energy(setup.devices) as energy:
            send(1, {"ready": {}})
            spool = (Inbox(0).receive() or {}).get("follow")
            if spool is None:
                return None
            slices = SliceOptions(options.steps, options.settle_s, options.skip)
            tuner = Tuner(limits, energy, policy, devices, Path(spool), slices)
            tuner.run(wait)
    return outcome(policy, devices, tuner.problem, tuple(notes[:_MOST_NOTES]))


def _until_end() -> Callable[[float], bool]:
    """Waits so long; True when stdin or our parent has ended."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    with contextlib.suppress(OSError):
        # A forked child of our parent may hold our stdin open.
        poller.register(os.pidfd_open(os.getppid()), select.POLLIN)

    def wait(timeout_s: float) -> bool:
        return bool(poller.poll(1000 * timeout_s))

    return wait


if __name__ == "__main__":
    code = main()
    # NVML's own threads and exit handlers have nothing left to do, and could hang.
    os._exit(code)
