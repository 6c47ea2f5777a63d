"""Calibrates a run: takes what its calls draw from the store, and replays those that are not known yet."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

import pyarrow as pa

from smaragdine.accounting.calibrated import Calibration
from smaragdine.accounting.calibrated import write as write_calibration
from smaragdine.accounting.run import Run
from smaragdine.calibrate.card_model import learned
from smaragdine.calibrate.meter import Meter, NvmlMeter
from smaragdine.calibrate.powers import idle_of, lacks_limit, modelled, powers, program_clock_mhz
from smaragdine.calibrate.replay import Call, CardProcess, ReplayProgress, calls_of, replay_all
from smaragdine.calibrate.store import MeasuredCall, Store
from smaragdine.errors import UserError
from smaragdine.sensors.nvml.gpus import ask, hold_library, nvml, release_library

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
        framework = calls[0].framework  # of two in one program, the one whose calls take longest
        known, lent_from = _known(store, gpu, _versions(run, framework))
        if lent_from and replay:
            known, lent_from = {}, ""  # its own are better
        clock_mhz = program_clock_mhz(run, device)
        missing = [
            call
            for call in calls
            if not call.lost and (call.key not in known or lacks_limit(known[call.key], clock_mhz))
        ]
        missing = [call for call in missing if call.framework == framework]
        done: list[MeasuredCall] = []
        if missing and replay:
            program = " ".join(run.info.get("command") or [])[:200]
            cards = cards or _Installed(python or _python(run))
            done = _replay(gpu, missing, store, budget_s, say, cards, program, clock_mhz)
            known |= {each.key: each for each in done}
        lent_from = "" if done else lent_from
        own = [each for call in calls if (each := known.get(call.key)) is not None]
        idle_w = idle_of(own or list(known.values()))
        used = powers(calls, known, idle_w, bool(lent_from), clock_mhz)
        whole_s = sum(call.busy_s for call in calls) or 1.0
        of_card = store.of(gpu["uuid"]) or list(known.values())  # by any library: a card is a card
        model = learned(of_card) if len(used) < len(calls) else None
        guessed = modelled(calls, used, model, idle_w)
        outcome = CalibratedDevice(
            device=device,
            card=gpu["uuid"],
            name=gpu.get("name") or "a GPU",
            calls=len(calls),
            known=len(used),
            busy_known=sum(call.busy_s for call in calls if call.id in used) / whole_s,
            replayed=sum(bool(each.cold or each.hot) for each in done),
            not_replayed=_reasons(calls, known, replay),
            lent_from=lent_from,
            busy_modelled=sum(call.busy_s for call in calls if call.id in guessed) / whole_s,
            model=model.remark if model is not None and guessed else "",
        )
        found.append(outcome)
        if used or guessed:
            written[device] = Calibration(used | guessed, idle_w, _remarks(outcome))
    if not written and not replay:
        raise UserError(
            f"{store.folder} knows nothing of the calls of {run.path}",
            "it has none of them, and too few others" if store.folder.is_dir() else "there is no such folder",
            "Replay them on the GPU, or name another store: --store DIR",
        )
    if not written:
        why = next((f"{op}: {why}" for each in found for op, why in each.not_replayed.items()), "")
        raise UserError(f"nothing is known of the calls of {run.path}", why or "none was replayed")
    if run.calibrations[0] and not any(each.known for each in found):
        raise UserError(
            f"{run.path} keeps the calibration that it has",
            f"{store.folder} has none of its calls, and a model of the card alone knows less",
            "Name another store: --store DIR",
        )
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
    clock_mhz: float | None,
) -> list[MeasuredCall]:
    card = cards.process(gpu["uuid"], missing[0].settings)
    meter = cards.meter(gpu)
    try:
        _wait_until_alone(meter, say)
        say(f"{len(missing)} calls on {gpu.get('name') or gpu['uuid']}")
        card.start()
        return replay_all(missing, card, meter, store, budget_s, say, program, clock_mhz)
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


def _reasons(calls: Sequence[Call], known: dict[str, MeasuredCall], replayed: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for call in calls:
        replay = known.get(call.key)
        if call.lost:
            found.setdefault(call.op, call.lost)
        elif replay is None:
            found.setdefault(call.op, "there was no time left" if replayed else "the store does not have it")
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
