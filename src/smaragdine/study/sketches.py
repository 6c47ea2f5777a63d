"""What figures show of a run that the footprint of a step does not say: small, and kept beside its result.

    OUT/sketches/NAME.json           dataflow, the power during a step, and when layers ran
    OUT/sketches/NAME-all.parquet    the summary footprint of a traced step, by all readings
    OUT/sketches/NAME-half.parquet   the same by every second reading

Only the first run of a setting has one, or the first that did not fail.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.accounting.account import account
from smaragdine.accounting.arithmetic import per_step, working_device
from smaragdine.accounting.footprint import Footprint, load, save, write_json
from smaragdine.accounting.meters import Meter
from smaragdine.accounting.overview import Overview
from smaragdine.accounting.precision import thin
from smaragdine.accounting.repeats import Ran, Repeated, Stretches, laid_over
from smaragdine.accounting.similarity import select
from smaragdine.accounting.traces import device_traces
from smaragdine.arrays import Floats
from smaragdine.errors import UserError
from smaragdine.files import read_json
from smaragdine.recording.format import EDGES
from smaragdine.recording.reader import Recording
from smaragdine.study.results import summary_inputs

SKETCHES = "sketches"  # in the folder of a study
_FORMAT = 1


@dataclass(frozen=True)
class Sketch:
    """Of the device that does the work."""

    name: str  # of the run
    device: str
    edges: pa.Table  # schema EDGES
    power: Repeated | None  # None: nothing repeats, or nothing was measured
    ran: Ran | None  # the layers that repeat
    all_readings: Footprint
    half_readings: Footprint


def sketch_of(name: str, recording: Recording, found: Overview) -> Sketch | None:
    """None where no device's operations have energy."""
    step = found.step
    device = working_device([step]) if step is not None else None
    if step is None or device is None:
        return None
    repeated = laid_over([(recording, found, device_traces(recording)[device])], device)
    power, ran = repeated or (None, None)
    return Sketch(name, device, recording.edges, power, ran, *_by_readings(recording, step, device))


def _by_readings(recording: Recording, step: Footprint, device: str) -> tuple[Footprint, Footprint]:
    events, meters = summary_inputs(recording, step)
    meter = meters.of[device]

    def every(k: int) -> Footprint:
        trace = thin(meter.trace, k, meter.readings)
        known = Meter(trace, meter.sensor, provenance=meter.provenance, idle_w=meter.idle_w)
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


def _ran_of(values: dict[str, Any]) -> Ran:
    return Ran(
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
