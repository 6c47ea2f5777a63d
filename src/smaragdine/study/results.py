"""What a study keeps of a run: the footprint of one step and a few figures, small enough to be carried about.

    OUT/results/NAME.parquet    the footprint of a step
    OUT/results/NAME.json       the rest of `Result`

The recording itself is needed no more once these are there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smaragdine.accounting.account import recording_inputs, thinned
from smaragdine.accounting.footprint import Footprint, load, save, write_json
from smaragdine.accounting.overview import overview
from smaragdine.accounting.precision import KS, score_json
from smaragdine.errors import UserError
from smaragdine.recording.reader import Recording
from smaragdine.study.settings import Fact, Run

RESULTS = "results"
_FORMAT = 1


@dataclass(frozen=True)
class Result:
    """One run. Energies are those of devices that add up."""

    name: str
    setting: str
    number: int
    facts: Mapping[str, Fact]
    step: Footprint  # of one step, as long and at the level of an untraced one
    steps: int  # all that were announced
    step_s: float | None  # of an untraced one; None: there were none
    traced_steps: int
    slower: float | None  # how much longer a traced step is
    duration_s: float
    energy_j: Mapping[str, float | None]  # device → of the whole program
    provenance: Mapping[str, str]  # device → measured, estimated
    data: str  # what it was trained on, as the program said it
    hardware: str
    # device → every n-th reading kept → energy, power, times_against_energy, constant_power
    asss: Mapping[str, Sequence[Mapping[str, float | int | None]]]
    remarks: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def result_of(run: Run, recording: Recording, log: str = "") -> Result:
    """`log` is what the program printed: it says `data: …`."""
    found = overview(recording)
    if found.step is None or found.steps is None:
        why = found.absent or "no step of it was traced"
        raise UserError(
            f"{run.name} has no footprint of a step", why, f"See smaragdine report {recording.path}"
        )
    devices = {name: device for name, device in found.summary.devices.items() if device.scope == "device"}
    return Result(
        name=run.name,
        setting=run.setting.name,
        number=run.number,
        facts=dict(run.setting.facts),
        step=found.step,
        steps=found.steps.count,
        step_s=found.steps.untraced_s,
        traced_steps=len(found.steps.traced_ns),
        slower=found.steps.slower,
        duration_s=found.summary.duration_s,
        energy_j={name: device.energy_j for name, device in devices.items()},
        provenance={name: device.provenance for name, device in devices.items()},
        data=_said(log, "data: ") or "not said by the program",
        hardware=_hardware(recording),
        asss=_asss(recording),
        remarks=tuple(found.summary.problems) + (found.tracing.remarks if found.tracing else ()),
        command=tuple(recording.info.get("command", [])),
    )


def save_result(folder: Path, result: Result) -> None:
    """The JSON file last: where it is, both are whole."""
    place = folder / RESULTS
    place.mkdir(parents=True, exist_ok=True)
    save(result.step, place / f"{result.name}.parquet")
    values = {key: value for key, value in vars(result).items() if key != "step"}
    write_json({"format_version": _FORMAT, **values}, place / f"{result.name}.json")


def load_results(folder: Path) -> list[Result]:
    """All that are there, by setting and number."""
    found = [load_result(path) for path in sorted((folder / RESULTS).glob("*.json"))]
    return sorted(found, key=lambda result: (result.setting, result.number))


def load_result(path: Path) -> Result:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = int(values.pop("format_version"))
        if version > _FORMAT:
            raise UserError(f"{path} is of a newer version of Smaragdine", remedy="Upgrade it")
        for key in ("remarks", "command"):
            values[key] = tuple(values[key])
        return Result(step=load(path.with_suffix(".parquet")), **values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no result of a study", str(error), "Run the study again") from None


def _said(log: str, before: str) -> str:
    return next(
        (line.removeprefix(before).strip() for line in log.splitlines() if line.startswith(before)), ""
    )


def _hardware(recording: Recording) -> str:
    host = recording.info.get("host", {})
    gpus = [str(gpu.get("name")) for gpu in host.get("gpus") or []]
    return ", ".join([*gpus, str(host.get("cpu") or "")]).strip(", ")


def _asss(recording: Recording) -> dict[str, list[dict[str, float | int | None]]]:
    events, meters = recording_inputs(recording)
    return {
        device: [score_json("every", score) for score in scores]
        for device, scores in thinned(events, meters, KS).items()
    }
