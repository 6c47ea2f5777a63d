"""Calibrates a run: takes what its calls draw from the store, and replays those that are not known yet."""

from __future__ import annotations

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
from smaragdine.calibrate.card_model import CallSketch, CardModel, learned
from smaragdine.calibrate.meter import Meter, NvmlMeter
from smaragdine.calibrate.replay import FITS, Call, CardProcess, ReplayProgress, calls_of, replay_all
from smaragdine.calibrate.store import CacheState, MeasuredCall, Store
from smaragdine.errors import UserError
from smaragdine.sensors.nvml.gpus import ask, hold_library, nvml, release_library

LENT = 0.04  # two cards of one kind differ by about as much
SLOWED = 0.2  # a call whose clock was held down even at rest draws less than in the program
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
    lent_from: str  # what else it was measured on; empty: on this very card and software
    busy_modelled: float  # of the busy time, the part of calls that go by the model of the card
    model: str  # what is to be known of it; empty if there is none


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
            "Record it anew on a GPU, with PyTorch or JAX: smaragdine run --calibrate train.py",
        )
    rows = run.recording.calls.to_pylist()
    found: list[CalibratedDevice] = []
    written: dict[str, Calibration] = {}
    for device in dict.fromkeys(row["device"] for row in rows):
        calls = calls_of(rows, device)
        gpu = _gpu(run, device)
        known, lent_from = _known(store, gpu, _versions(run, calls[0].framework))
        if lent_from and replay:
            known, lent_from = {}, ""  # its own are better
        missing = [call for call in calls if call.key not in known and not call.lost]
        done: list[MeasuredCall] = []
        if missing and replay:
            program = " ".join(run.info.get("command") or [])[:200]
            cards = cards or _Installed(python or _python(run))
            done = _replay(gpu, missing, store, budget_s, say, cards, program)
            known |= {each.key: each for each in done}
        lent_from = "" if done else lent_from
        used = powers(calls, known, bool(lent_from))
        own = [each for call in calls if (each := known.get(call.key)) is not None]
        idle_w = _idle_w(own or list(known.values()))
        whole_s = sum(call.busy_s for call in calls) or 1.0
        model = learned(known.values())
        guessed = _guessed(calls, used, model, idle_w)
        outcome = CalibratedDevice(
            device=device,
            card=gpu["uuid"],
            name=gpu.get("name") or "a GPU",
            calls=len(calls),
            known=len(used),
            busy_known=sum(call.busy_s for call in calls if call.id in used) / whole_s,
            replayed=sum(bool(each.cold or each.hot) for each in done),
            not_replayed=_reasons(calls, known),
            lent_from=lent_from,
            busy_modelled=sum(call.busy_s for call in calls if call.id in guessed) / whole_s,
            model=model.remark if model is not None and guessed else "",
        )
        found.append(outcome)
        if used or guessed:
            written[device] = Calibration(used | guessed, idle_w, _remarks(outcome))
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
    return "it was recorded by another framework than PyTorch and JAX, or by an older version of smaragdine"


def _gpu(run: Run, device: str) -> dict[str, Any]:
    gpus: list[dict[str, Any]] = (run.info.get("host") or {}).get("gpus") or []
    for gpu in gpus:
        if gpu.get("device") == device and gpu.get("uuid"):
            return gpu
    raise UserError(f"{run.path} does not say which card {device} was")


def _versions(run: Run, framework: str) -> tuple[str | None, str | None]:
    """The driver and the library that chose the kernels, as replays name them; None: not known."""
    driver = (run.info.get("host") or {}).get("driver")
    version = (run.info.get("libraries") or {}).get(framework)
    return driver, version and f"{framework} {version}"


def _known(
    store: Store, gpu: dict[str, Any], versions: tuple[str | None, str | None]
) -> tuple[dict[str, MeasuredCall], str]:
    """Of this card with this driver and library; else of what is nearest to it, and what that is."""

    def same_software(replay: MeasuredCall) -> bool:
        asked = zip(versions, (replay.driver, replay.library), strict=True)
        return all(one is None or one == other for one, other in asked)

    cards = store.cards()
    own = cards.pop(gpu["uuid"], [])
    others = [each for replays in cards.values() for each in replays if each.name == gpu.get("name")]
    for replays, whose in ((own, ""), (others, f"another {gpu.get('name')}")):
        if fitting := {each.key: each for each in replays if same_software(each)}:
            return fitting, whose
    for replays, whose in ((own, "the same card"), (others, f"another {gpu.get('name')}")):
        if replays:
            older = ", ".join(sorted({f"driver {each.driver}, {each.library}" for each in replays}))
            return {each.key: each for each in replays}, f"{whose} ({older})"
    return {}, ""


def _replay(
    gpu: dict[str, Any],
    missing: Sequence[Call],
    store: Store,
    budget_s: float,
    say: Callable[[str | ReplayProgress], None],
    cards: Cards,
    program: str,
) -> list[MeasuredCall]:
    card = cards.process(gpu["uuid"], missing[0].settings)
    meter = cards.meter(gpu)
    try:
        _wait_until_alone(meter, say)
        say(f"{len(missing)} calls on {gpu.get('name') or gpu['uuid']}")
        card.start()
        return replay_all(missing, card, meter, store, budget_s, say, program)
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
            "Calibrate where the run was recorded, or use a store, of this card or one of its kind: "
            "--no-replay --store DIR",
        ) from None
    try:
        lib = nvml()
        handle = ask(lib.nvmlDeviceGetHandleByUUID, gpu["uuid"])
        if handle is None:
            raise UserError(
                f"this machine does not have {gpu.get('name') or 'the card'} {gpu['uuid']}",
                "a calibration belongs to a card",
                "Calibrate where the run was recorded, or use a store, of this card or one of its kind: "
                "--no-replay --store DIR",
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
        if call.lost:
            found.setdefault(call.op, call.lost)
        elif replay is None:
            found.setdefault(call.op, "there was no time left")
        elif replay.why:
            found.setdefault(call.op, replay.why)
    return found


def _remarks(outcome: CalibratedDevice) -> tuple[str, ...]:
    said: list[str] = []
    if outcome.lent_from:
        said.append(
            f"{outcome.device}: its calibration is lent from {outcome.lent_from}; two cards of one kind "
            "differ by some 3 %, and error bars are wider for it"
        )
    if outcome.model:
        said.append(f"{outcome.device}: {outcome.model}")
    return tuple(said)


# From what is known of a card to the powers of one run's calls.


def powers(calls: Sequence[Call], replays: Mapping[str, MeasuredCall], lent: bool) -> dict[int, CallPower]:
    """Call → its power in this run, all above the same idle power."""
    known = [replay for call in calls if (replay := replays.get(call.key)) is not None]
    idle_w = _idle_w(known)
    found = {call.id: _power(call, replays.get(call.key), idle_w, lent) for call in calls}
    return {call: power for call, power in found.items() if power is not None}


def _idle_w(replays: Sequence[MeasuredCall]) -> float:
    """The card warms up while it replays, and draws more at idle for it: the middle stands for all."""
    return statistics.median([each.idle_w for each in replays] or [0.0])


def _guessed(
    calls: Sequence[Call], used: Mapping[int, CallPower], model: CardModel | None, idle_w: float
) -> dict[int, CallPower]:
    """Of the calls that nobody replayed."""
    left = [call for call in calls if call.id not in used]
    if model is None:
        return {}
    guesses = model.guesses([CallSketch(call.op, *call.largest, call.time_s) for call in left])
    return {
        call.id: CallPower(idle_w + guess.above_w, guess.deviation, modelled=True)
        for call, guess in zip(left, guesses, strict=True)
    }


def _power(call: Call, replay: MeasuredCall | None, idle_w: float, lent: bool) -> CallPower | None:
    if replay is None or (replay.cold is None and replay.hot is None):
        return None
    above_j, gap, state = _at_time(call.time_s, replay)
    deviation = math.hypot(state.spread, gap)
    if lent:
        deviation = math.hypot(deviation, LENT)
    if state.slowed > SLOWED:
        deviation = math.hypot(deviation, SLOWED / 2)
    return CallPower(idle_w + above_j / call.time_s, deviation)


def _at_time(time_s: float, replay: MeasuredCall) -> tuple[float, float, CacheState]:
    """What one call takes above the idle card, and how far off that may be, as a part of it.

    A call does the same work whether the card gets to it at once or a microsecond later, so what a replay
    tells is its energy, not its power. The state of the caches changes the work: a time between cold and hot
    has an energy between theirs.
    """
    cold, hot = replay.cold, replay.hot
    if cold is None or hot is None or cold.time_s <= hot.time_s:
        state = cold or hot
        assert state is not None
        return _above_j(state, replay), _gap(time_s, state.time_s), state
    part = min(max((cold.time_s - time_s) / (cold.time_s - hot.time_s), 0.0), 1.0)
    at_s = cold.time_s + part * (hot.time_s - cold.time_s)
    cold_j, hot_j = _above_j(cold, replay), _above_j(hot, replay)
    above_j = cold_j + part * (hot_j - cold_j)
    between = abs(cold_j - hot_j) / max(above_j, 1e-12) / 4
    return above_j, math.hypot(_gap(time_s, at_s), between), cold


def _above_j(state: CacheState, replay: MeasuredCall) -> float:
    return max(state.power_w - replay.idle_w, 0.0) * state.time_s


def _gap(time_s: float, replayed_s: float) -> float:
    """A call that takes another time is not quite the same call: half of the difference may be energy."""
    off = abs(time_s / replayed_s - 1) if replayed_s > 0 else 1.0
    return 0.0 if off <= FITS else min(off / 2, 0.3)
