"""Calibrates a run: takes what its calls draw from the store, and replays those that are not known yet."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

import pyarrow as pa

from smaragdine.accounting.calibrated import Calibration, CallPower
from smaragdine.accounting.calibrated import write as write_calibration
from smaragdine.accounting.run import Run
from smaragdine.calibrate.meter import Meter, NvmlMeter
from smaragdine.calibrate.replay import FITS, Call, CardProcess, ReplayProgress, calls_of, replay_all
from smaragdine.calibrate.store import CacheState, MeasuredCall, Store
from smaragdine.errors import UserError
from smaragdine.sensors.nvml.gpus import ask, hold_library, nvml, release_library

LENT = 0.04  # two cards of one kind differ by about as much
SLOWED = 0.2  # a call whose clock was held down even at rest draws less than in the program
AS_FAST = 0.01  # of the clock
WAITING_FOLLOWS = 0.4  # of a call that waits for memory, the part of its power that follows the clock
_WAIT_S = 60.0
_LOOK_S = 2.0


@dataclass(frozen=True)
class CalibratedDevice:
    """What came of it, for one device."""

    device: str
    card: str
    name: str
    calls: int
    known: int
    busy_known: float  # of the busy time, the part of calls that are known
    replayed: int  # of the known calls, those replayed now
    not_replayed: dict[str, str]  # operation → why, the largest first
    lent: bool


class Cards(Protocol):
    """Where a run's card is found, and what calls run with there."""

    def process(self, uuid: str, settings: Mapping[str, Any]) -> CardProcess: ...

    def meter(self, gpu: dict[str, Any]) -> Meter: ...


class _Installed:
    """The cards of this machine."""

    def __init__(self, python: str) -> None:
        self._python = python

    def process(self, uuid: str, settings: Mapping[str, Any]) -> CardProcess:
        return CardProcess(self._python, uuid, settings)

    def meter(self, gpu: dict[str, Any]) -> Meter:
        return _open_meter(gpu)


def calibrate(
    run: Run,
    store: Store,
    *,
    budget_s: float,
    python: str | None = None,
    replay: bool = True,
    say: Callable[[str | ReplayProgress], None],
    cards: Cards | None = None,
) -> list[CalibratedDevice]:
    """Every GPU of the run. Raises `UserError` where nothing can be known of any."""
    if not run.recording.calls.num_rows:
        raise UserError(
            f"{run.path} has no calls to replay",
            _why_no_calls(run),
            "Record it anew on a GPU, with PyTorch: smaragdine run --calibrate train.py",
        )
    rows = run.recording.calls.to_pylist()
    found: list[CalibratedDevice] = []
    written: dict[str, Calibration] = {}
    for device in dict.fromkeys(row["device"] for row in rows):
        calls = calls_of(rows, device)
        gpu = _gpu(run, device)
        known, lent = _known(store, gpu)
        missing = [call for call in calls if call.key not in known]
        done: list[MeasuredCall] = []
        if missing and replay:
            done = _replay(gpu, missing, store, budget_s, say, cards or _Installed(python or _python(run)))
            known |= {each.key: each for each in done}
        used = powers(calls, known, lent and not done, _clock_mhz(run, device))
        idle_w = [each.idle_w for call in calls if (each := known.get(call.key)) is not None]
        whole_s = sum(call.busy_s for call in calls) or 1.0
        outcome = CalibratedDevice(
            device=device,
            card=gpu["uuid"],
            name=gpu.get("name") or "a GPU",
            calls=len(calls),
            known=len(used),
            busy_known=sum(call.busy_s for call in calls if call.id in used) / whole_s,
            replayed=sum(bool(each.cold or each.hot) for each in done),
            not_replayed=_reasons(calls, known),
            lent=lent and not done,
        )
        found.append(outcome)
        if used:
            written[device] = Calibration(used, statistics.median(idle_w), _remarks(outcome))
    if not written:
        why = next((f"{op}: {why}" for each in found for op, why in each.not_replayed.items()), "")
        raise UserError(f"nothing is known of the calls of {run.path}", why or "none was replayed")
    write_calibration(run.path, written)
    return found


def check_gpu() -> None:
    """Refuses what could only fail after the program: calibrating where there is no GPU."""
    try:
        hold_library()
    except nvml().NVMLError as error:
        raise UserError(
            "--calibrate needs an NVIDIA GPU", str(error), "Leave it out; smaragdine doctor says more"
        ) from None
    release_library()


def _why_no_calls(run: Run) -> str:
    if lost := run.recording.lost("calls"):
        return lost
    events = run.recording.events
    devices: list[str] = events["device"].cast(pa.string()).unique().to_pylist()
    on_gpu = any(device.startswith("gpu:") for device in devices)
    if not (run.info.get("host") or {}).get("gpus") or (devices and not on_gpu):
        return "it ran on no GPU, and what a processor draws is not replayed yet"
    if not devices:
        return "no steps were traced"
    return "it was recorded by another framework than PyTorch, or by an older version of smaragdine"


def _gpu(run: Run, device: str) -> dict[str, Any]:
    gpus: list[dict[str, Any]] = (run.info.get("host") or {}).get("gpus") or []
    for gpu in gpus:
        if gpu.get("device") == device and gpu.get("uuid"):
            return gpu
    raise UserError(f"{run.path} does not say which card {device} was")


def _known(store: Store, gpu: dict[str, Any]) -> tuple[dict[str, MeasuredCall], bool]:
    """Of this card; else of one of its kind, and whether it is lent."""
    own = {each.key: each for each in store.of(gpu["uuid"])}
    if own:
        return own, False
    for replays in store.cards().values():
        if replays[0].name == gpu.get("name"):
            return {each.key: each for each in replays}, True
    return {}, False


def _replay(
    gpu: dict[str, Any],
    missing: Sequence[Call],
    store: Store,
    budget_s: float,
    say: Callable[[str | ReplayProgress], None],
    cards: Cards,
) -> list[MeasuredCall]:
    card = cards.process(gpu["uuid"], missing[0].settings)
    meter = cards.meter(gpu)
    try:
        _wait_until_alone(meter, say)
        say(f"{len(missing)} calls on {gpu.get('name') or gpu['uuid']}")
        card.start()
        return replay_all(missing, card, meter, store, budget_s, say)
    finally:
        card.close()
        meter.close()


def _open_meter(gpu: dict[str, Any]) -> NvmlMeter:
    try:
        hold_library()
    except nvml().NVMLError as error:
        raise UserError(
            "no GPU can be measured here",
            str(error),
            "Calibrate where the run was recorded, or bring its store: --store DIR",
        ) from None
    try:
        lib = nvml()
        handle = ask(lib.nvmlDeviceGetHandleByUUID, gpu["uuid"])
        if handle is None:
            raise UserError(
                f"this machine does not have {gpu.get('name') or 'the card'} {gpu['uuid']}",
                "a calibration belongs to a card",
                "Calibrate where the run was recorded, or bring its store: --store DIR",
            )
        if ask(lib.nvmlDeviceGetTotalEnergyConsumption, handle) is None:
            raise UserError(
                f"{gpu.get('name') or gpu['uuid']} has no energy counter", "replays are measured by it"
            )
        return NvmlMeter(gpu["uuid"])
    finally:
        release_library()


def _wait_until_alone(meter: Meter, say: Callable[[str | ReplayProgress], None]) -> None:
    until_s = time.monotonic() + _WAIT_S
    while others := meter.processes():
        listed = ", ".join(map(str, others))
        if time.monotonic() > until_s:
            raise UserError(
                f"{meter.name} is in use by others (process {listed})",
                "what they draw would be taken for the call's",
                "Calibrate when they are done",
            )
        say(f"waiting for process {listed}, which uses {meter.name}")
        time.sleep(_LOOK_S)


def _python(run: Run) -> str:
    """The program's interpreter, as far as its command says."""
    words: list[str] = run.info.get("command") or []
    first = words[0] if words else ""
    is_python = PurePath(first).name.startswith("python") and Path(first).exists()
    return first if is_python else sys.executable


def _reasons(calls: Sequence[Call], known: dict[str, MeasuredCall]) -> dict[str, str]:
    found: dict[str, str] = {}
    for call in calls:
        replay = known.get(call.key)
        if replay is None:
            found.setdefault(call.op, "there was no time left")
        elif replay.why:
            found.setdefault(call.op, replay.why)
    return found


def _remarks(outcome: CalibratedDevice) -> tuple[str, ...]:
    if not outcome.lent:
        return ()
    return (
        f"{outcome.device}: its calibration is lent from another {outcome.name}; two cards of one kind "
        "differ by some 3 %",
    )


# From what is known of a card to the powers of one run's calls.


def powers(
    calls: Sequence[Call], replays: Mapping[str, MeasuredCall], lent: bool, clock_mhz: float | None = None
) -> dict[int, CallPower]:
    """Call → its power in this run, whose clock was so high."""
    found = {call.id: _power(call, replays.get(call.key), lent, clock_mhz) for call in calls}
    return {call: power for call, power in found.items() if power is not None}


def _power(call: Call, replay: MeasuredCall | None, lent: bool, clock_mhz: float | None) -> CallPower | None:
    if replay is None or (replay.cold is None and replay.hot is None):
        return None
    slower = _at_clock(replay, clock_mhz)
    power_w, time_s, between, state = _at_time(call.time_s, *slower.of(replay))
    deviation = math.hypot(state.spread, between, slower.deviation)
    if lent:
        deviation = math.hypot(deviation, LENT)
    if state.slowed > SLOWED:
        deviation = math.hypot(deviation, SLOWED / 2)
    alone = min(time_s / call.time_s, 1.0) if call.time_s > 0 else 1.0
    return CallPower(power_w, deviation, _gap(call.time_s, time_s), alone)


@dataclass(frozen=True)
class _Slower:
    """What a lower clock makes of a call."""

    power: float = 1.0  # above idle, times that of the replay
    time: float = 1.0
    deviation: float = 0.0

    def of(self, replay: MeasuredCall) -> list[CacheState | None]:
        """Its cold and hot states at that clock."""
        return [
            state
            and dataclasses.replace(
                state,
                power_w=replay.idle_w + (state.power_w - replay.idle_w) * self.power,
                time_s=state.time_s * self.time,
            )
            for state in (replay.cold, replay.hot)
        ]


def _at_clock(replay: MeasuredCall, clock_mhz: float | None) -> _Slower:
    """A program that meets the card's limits runs at a lower clock than replays with rests. Back to back a
    product met them, too: between the two clocks its power lies between the two powers."""
    free = replay.cold or replay.hot
    if free is None or not clock_mhz or clock_mhz > free.clock_mhz * (1 - AS_FAST):
        return _Slower()
    limited = replay.limited
    if limited is None or limited.clock_mhz > free.clock_mhz * (1 - AS_FAST):
        # It never met them: most of it waits for memory, and the rest follows the clock.
        less = WAITING_FOLLOWS * (1 - clock_mhz / free.clock_mhz)
        return _Slower(power=1 - less, deviation=less)
    part = (free.clock_mhz - clock_mhz) / (free.clock_mhz - limited.clock_mhz)
    part, beyond = min(part, 1.5), max(part - 1, 0.0)
    above_w, limited_w = free.power_w - replay.idle_w, limited.power_w - replay.idle_w
    lower = 1 - limited_w / max(above_w, 1.0)
    return _Slower(
        power=1 - part * lower,
        time=1 + part * (limited.time_s / free.time_s - 1),
        deviation=abs(lower) * (0.1 * min(part, 1.0) + 0.3 * min(beyond, 1.0)),
    )


def _clock_mhz(run: Run, device: str) -> float | None:
    """Of the multiprocessors, the mean over the traced steps; None where nobody read it."""
    windows = [(window["begin_ns"], window["end_ns"]) for window in run.recording.windows.to_pylist()]
    read: list[float] = []
    for series in run.recording.series("telemetry"):
        if (series.channel.device, series.channel.quantity) == (device, "sm_clock"):
            inside = [(series.t_ns >= begin_ns) & (series.t_ns <= end_ns) for begin_ns, end_ns in windows]
            read += [float(mhz) for each in inside for mhz in series.value[each]]
    return statistics.fmean(read) if read else None


def _at_time(
    time_s: float, cold: CacheState | None, hot: CacheState | None
) -> tuple[float, float, float, CacheState]:
    """Power and time of the cache state whose time is the program's, and how far off that power may be. A
    time between the two states has a power between theirs."""
    if cold is None or hot is None or cold.time_s <= hot.time_s:
        state = cold or hot
        assert state is not None
        return state.power_w, state.time_s, 0.0, state
    part = min(max((cold.time_s - time_s) / (cold.time_s - hot.time_s), 0.0), 1.0)
    at_s = cold.time_s + part * (hot.time_s - cold.time_s)
    power_w = cold.power_w + part * (hot.power_w - cold.power_w)
    return power_w, at_s, abs(cold.power_w - hot.power_w) / max(power_w, 1.0) / 4, cold


def _gap(time_s: float, replayed_s: float) -> float:
    """A call that takes another time is not quite the same call: half of the difference may be power."""
    off = abs(time_s / replayed_s - 1) if replayed_s > 0 else 1.0
    return 0.0 if off <= FITS else min(off / 2, 0.3)
