"""What a study keeps of a run: the footprint of one step and a few figures, small enough to be carried about.

    OUT/results/NAME.parquet    the footprint of a step
    OUT/results/NAME.json       the rest of `Result`

The recording itself is needed no more once these are there, and the sketch of the first run of a setting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.accounting.account import account, thinned
from smaragdine.accounting.arithmetic import per_step, working_device
from smaragdine.accounting.device_power import DevicePower
from smaragdine.accounting.footprint import Footprint, load, save, write_json
from smaragdine.accounting.merge import renaming
from smaragdine.accounting.precision import KS, score_json, thin
from smaragdine.accounting.repeats import LayerTimes, Repeated, Stretches, laid_over
from smaragdine.accounting.run import Run
from smaragdine.accounting.similarity import select
from smaragdine.arrays import Floats
from smaragdine.errors import UserError
from smaragdine.files import read_json
from smaragdine.recording.format import EDGES, TRACES_FOLDER
from smaragdine.recording.reader import Recording
from smaragdine.study.plan import Fact, StudyRun

RESULTS = "results"
_FORMAT = 1


@dataclass(frozen=True)
class Result:
    """One run. Energies are those of devices that add up."""

    name: str
    setting: str
    number: int
    facts: Mapping[str, Fact]
    step: Footprint  # of one step, at the level of an untraced one where that can be told
    steps: int  # all that were announced
    step_s: float | None  # of the step whose energy `step` has, the mean; None: it is not known
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
    period_ms: Mapping[str, float] = field(default_factory=dict[str, float])  # device → between two readings
    # what measuring it took: see `_cost`
    cost: Mapping[str, float | int | None] = field(default_factory=dict[str, float | int | None])
    cards: tuple[str, ...] = ()  # the GPUs' own numbers: two of one kind need not draw the same


def result_of(
    run: StudyRun,
    recorded: Run,
    log: str = "",
    assemble_s: float | None = None,
    account_s: float | None = None,
) -> Result:
    """`log` is what the program printed: it says `data: …`. CPU seconds: `assemble_s` for the events,
    `account_s` from the recording's files to its figures."""
    if recorded.step is None or recorded.steps is None:
        why = recorded.absent or "no step of it was traced"
        raise UserError("no footprint of a step", why)
    devices = {name: device for name, device in recorded.summary.devices.items() if device.scope == "device"}
    few = _few_traced(len(recorded.steps.traced_ns), run.setting.trace_steps)
    return Result(
        name=run.name,
        setting=run.setting.name,
        number=run.number,
        facts=dict(run.setting.facts),
        step=recorded.step,
        steps=recorded.steps.count,
        step_s=recorded.step_s,
        traced_steps=len(recorded.steps.traced_ns),
        slower=recorded.steps.slower,
        duration_s=recorded.summary.duration_s,
        energy_j={name: device.energy_j for name, device in devices.items()},
        provenance={name: device.provenance for name, device in devices.items()},
        data=_said(log, "data: ") or "not said by the program",
        hardware=hardware_of(recorded.recording),
        asss=_asss(recorded),
        remarks=(*recorded.summary.problems, *(recorded.tracing.remarks if recorded.tracing else ()), *few),
        command=tuple(recorded.info.get("command", [])),
        period_ms={name: channel.period_ms for name, channel in recorded.channels.items()},
        cost=_cost(recorded, assemble_s, account_s),
        cards=_cards_of(recorded.recording),
    )


def _few_traced(traced: int, asked: int) -> tuple[str, ...]:
    """One or two less, at the windows' ends, say nothing."""
    if asked - traced <= max(2, 0.1 * asked):
        return ()
    why = "the others passed while the profiler wrote its files, or the program ended first"
    return (f"{traced} of {asked} steps were traced: {why}",)


def _cost(run: Run, assemble_s: float | None, account_s: float | None) -> dict[str, float | int | None]:
    """Of monitoring, tracing, assembling events and accounting them: in CPU seconds, which a busy machine
    does not change."""
    monitors: list[dict[str, Any]] = run.info.get("monitor") or []
    wall_s = sum(each["wall_s"] for each in monitors)
    steps = run.steps
    return {
        "devices": len({channel.device for channel in run.recording.channels if channel.scope == "device"}),
        "channels": len(run.recording.channels),
        "readings": sum(each["readings"] for each in monitors) if monitors else None,
        "monitor_cpu_s": sum(each["cpu_s"] for each in monitors) if monitors else None,
        "monitor_s": wall_s or None,
        "traced_step_s": steps.traced_s if steps else None,
        "paused_s": steps.paused_s if steps else None,
        "tracing_part": steps.cost if steps else None,  # longer, as a part of all steps untraced
        "events": run.recording.events.num_rows,
        "assemble_s": assemble_s,
        "account_s": account_s,
        "bytes": _size_bytes(run.path),
    }


def _size_bytes(recording: Path) -> int:
    """Without its raw trace, which goes."""
    raw = recording / TRACES_FOLDER
    return sum(path.stat().st_size for path in recording.rglob("*") if path.is_file() and path.parent != raw)


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


def machines_of(folder: Path) -> tuple[set[str], set[str]]:
    """Of all runs that are there: as `hardware_of` names them, and their cards as far as these are known."""
    found = load_results(folder)
    return {result.hardware for result in found}, {card for result in found for card in result.cards}


def by_setting(results: Iterable[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.setting, []).append(result)
    return found


def load_result(path: Path) -> Result:
    try:
        values: dict[str, Any] = read_json(path)
        version = int(values.pop("format_version"))
        if version > _FORMAT:
            raise UserError(f"{path} is of a newer version of Smaragdine", remedy="Upgrade it")
        for key in ("remarks", "command"):
            values[key] = tuple(values[key])
        values["cards"] = tuple(values.get("cards", ()))
        for key in ("facts", "energy_j", "provenance", "asss"):
            values[key] = dict(values[key])
    except KeyError as error:
        raise _broken(path, f"it has no {error.args[0]}") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _broken(path, str(error)) from None
    try:
        return Result(step=load(path.with_suffix(".parquet")), **values)
    except TypeError as error:
        raise _broken(path, str(error)) from None
    except UserError as error:
        raise _broken(path, error.reason) from None


def _broken(path: Path, why: str) -> UserError:
    return UserError(f"{path} is no result of a study", why.rstrip("."), "Remove it, and run the study again")


def _said(log: str, before: str) -> str:
    return next(
        (line.removeprefix(before).strip() for line in log.splitlines() if line.startswith(before)), ""
    )


def hardware_of(recording: Recording) -> str:
    host = recording.info.get("host", {})
    gpus = [str(gpu.get("name") or "a GPU") for gpu in host.get("gpus") or []]
    return hardware_named(gpus, host.get("cpu"))


def _cards_of(recording: Recording) -> tuple[str, ...]:
    gpus = recording.info.get("host", {}).get("gpus") or []
    return tuple(sorted(str(gpu["uuid"]) for gpu in gpus if gpu.get("uuid")))


def hardware_named(gpus: Sequence[str], cpu: object) -> str:
    return ", ".join([*gpus, str(cpu or "")]).strip(", ")


def _asss(run: Run) -> dict[str, list[dict[str, float | int | None]]]:
    """Of summary footprints, as the paper has it: the same operation of all layers is one."""
    events, meters = run.events_as(renaming([run.needed]))
    return {
        device: [score_json("every", score) for score in scores]
        for device, scores in thinned(events, meters, KS).items()
    }


# What figures show of a run that the footprint of a step does not say: small, and kept beside its result.
#
#     OUT/sketches/NAME.json           dataflow, the power during a step, and when layers ran
#     OUT/sketches/NAME-all.parquet    the summary footprint of a traced step, by all readings
#     OUT/sketches/NAME-half.parquet   the same by every second reading
#
# Only the first run of a setting has one, or the first that did not fail.

SKETCHES = "sketches"  # in the folder of a study


@dataclass(frozen=True)
class Sketch:
    """Of the device that does the work."""

    name: str  # of the run
    device: str
    edges: pa.Table  # schema EDGES
    power: Repeated | None  # None: nothing repeats, or nothing was measured
    ran: LayerTimes | None  # the layers that repeat
    all_readings: Footprint
    half_readings: Footprint


def sketch_of(name: str, run: Run) -> Sketch | None:
    """None where no device's operations have energy."""
    device = working_device([run.step]) if run.step is not None else None
    if device is None:
        return None
    power, ran = laid_over([run], device) or (None, None)
    return Sketch(name, device, run.edges, power, ran, *_by_readings(run, device))


def _by_readings(run: Run, device: str) -> tuple[Footprint, Footprint]:
    events, meters = run.events_as(renaming([run.needed]))
    meter = meters.of[device]

    def every(k: int) -> Footprint:
        trace = thin(meter.trace, k, meter.readings)
        known = DevicePower(trace, meter.sensor, provenance=meter.provenance, idle_w=meter.idle_w)
        found = select(account(events, {device: known}, narrowed=False), device)
        return per_step(found) if found.devices[device].steps else found

    return every(1), every(2)


def save_sketch(folder: Path, sketch: Sketch) -> None:
    """The JSON file last: where it is, all are whole."""
    place = folder / SKETCHES
    place.mkdir(parents=True, exist_ok=True)
    save(sketch.all_readings, place / f"{sketch.name}-all.parquet")
    save(sketch.half_readings, place / f"{sketch.name}-half.parquet")
    values = {
        "format_version": _FORMAT,
        "device": sketch.device,
        "edges": [[edge["source"], edge["target"]] for edge in sketch.edges.to_pylist()],
        "power": None if sketch.power is None else _power_json(sketch.power),
        "ran": None if sketch.ran is None else dataclasses.asdict(sketch.ran),
    }
    write_json(values, place / f"{sketch.name}.json")


def has_sketch(folder: Path, setting: str) -> bool:
    """Whether any run of it has one."""
    names = (path.stem for path in (folder / SKETCHES).glob("*.json"))
    return any(name.rpartition("-")[0] == setting for name in names)


def load_sketch(folder: Path, name: str) -> Sketch | None:
    """None where there is none: of an older version, or of a run that is not its setting's first."""
    path = folder / SKETCHES / f"{name}.json"
    try:
        values: dict[str, Any] = read_json(path)
        if int(values["format_version"]) > _FORMAT:
            raise ValueError("it is of a newer version of Smaragdine")
        power, ran = values["power"], values["ran"]
        edges = [{"source": source, "target": target} for source, target in values["edges"]]
        return Sketch(
            name=name,
            device=str(values["device"]),
            edges=pa.Table.from_pylist(edges, schema=EDGES),
            power=None if power is None else _power_of(power),
            ran=None if ran is None else _ran_of(ran),
            all_readings=load(path.with_name(f"{name}-all.parquet")),
            half_readings=load(path.with_name(f"{name}-half.parquet")),
        )
    except FileNotFoundError:
        return None
    except UserError as error:
        raise UserError(f"{path} is no sketch of a study", str(error).rstrip("."), "Remove it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        why = f"it has no {error.args[0]}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise UserError(f"{path} is no sketch of a study", why, "Remove it") from None


def _power_json(power: Repeated) -> dict[str, Any]:
    return {
        "of": power.of,
        "count": power.count,
        "edges_s": power.edges_s.tolist(),
        "mean_w": _or_none(power.mean_w),
        "std_w": _or_none(power.std_w),
    }


def _power_of(values: dict[str, Any]) -> Repeated:
    edges_s, mean_w, std_w = (_floats(values[key]) for key in ("edges_s", "mean_w", "std_w"))
    if not len(edges_s) - 1 == len(mean_w) == len(std_w):
        raise ValueError("its power has not as many cells as edges")
    return Repeated(str(values["of"]), int(values["count"]), edges_s, mean_w, std_w)


def _ran_of(values: dict[str, Any]) -> LayerTimes:
    return LayerTimes(
        layer=str(values["layer"]),
        spans_s=_stretches(values["spans_s"]),
        others=tuple(str(other) for other in values.get("others", ())),  # older ones do not say
        others_s=_stretches(values.get("others_s", ())),
    )


def _stretches(values: Sequence[Sequence[Sequence[float]]]) -> Stretches:
    return [[(float(begin), float(end)) for begin, end in spans] for spans in values]


def _or_none(values: Floats) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array(values, dtype=np.float64)  # None becomes nan
