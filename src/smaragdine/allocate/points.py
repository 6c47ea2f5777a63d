"""The points of a profile that is being made: each is on disk once it is measured, so that a profile goes on
where it was interrupted.

    a10.profile/request.json        what is profiled
    a10.profile/batch32-150W.json   a point, beside its recording and what the program printed
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smaragdine.allocate.profile import profile_table
from smaragdine.allocate.profiling import Block, Steps
from smaragdine.errors import UserError

# Beyond the columns that allocate reads.
_MORE = ("energy_error_j", "updates", "provenance")


@dataclass(frozen=True)
class Point:
    """A batch size at a limit; without `steps` it did not fit into memory."""

    batch: int
    power_limit_w: float
    steps: Steps | None

    @property
    def name(self) -> str:
        return point_name(self.batch, self.power_limit_w)


def point_name(batch: int, power_limit_w: float) -> str:
    return f"batch{batch}-{power_limit_w:g}W"


def claim(folder: Path, request: Mapping[str, Any]) -> None:
    """Take the folder for this request, or go on with it. Raises `UserError` where it is another's."""
    file = folder / "request.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            write_json(file, request)
            return
        known: Any = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{folder} cannot be written", error.strerror or str(error)) from None
    except ValueError as error:
        raise UserError(f"{file} cannot be read", str(error), f"Remove {folder} to begin anew") from None
    for key, value in request.items():
        if known.get(key) != value:
            why = f"its {key.replace('_', ' ')} was {known.get(key)}, not {value}"
            raise UserError(f"{folder} is of another profile", why, "Remove it, or name another file with -o")


def save_point(folder: Path, point: Point) -> None:
    try:
        write_json(folder / f"{point.name}.json", asdict(point))
    except OSError as error:
        raise UserError(f"{folder} cannot be written", error.strerror or str(error)) from None


def load_point(folder: Path, batch: int, power_limit_w: float) -> Point | None:
    """None where it was not measured yet."""
    try:
        values: Any = json.loads((folder / f"{point_name(batch, power_limit_w)}.json").read_bytes())
        steps = values["steps"]
        if steps is None:
            return Point(batch, power_limit_w, None)
        blocks = tuple(Block(**block) for block in steps["blocks"])
        return Point(batch, power_limit_w, Steps(blocks, steps["updates"], steps["provenance"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_profile(
    path: Path, gpu: str, points: Sequence[Point], idle_w: float | None, wait_w: float | None
) -> None:
    """As Parquet with a row per block, or in the original's shape where the name ends in .json."""
    try:
        if path.suffix == ".json":
            write_json(path, original_shape(points))
            return
        import pyarrow.parquet as pq

        with _whole(path) as part:
            pq.write_table(parquet_table(gpu, points, idle_w, wait_w), part)
    except OSError as error:
        raise UserError(f"{path} cannot be written", error.strerror or str(error)) from None


def original_shape(points: Sequence[Point]) -> dict[str, list[dict[str, float]]]:
    """{batch: [{power_limit, energy, time}, …]}, of one step; what did not fit is left out."""
    found: dict[str, list[dict[str, float]]] = {}
    for point in points:
        if point.steps is not None:
            row = {"power_limit": point.power_limit_w, "energy": point.steps.energy_j}
            found.setdefault(str(point.batch), []).append({**row, "time": point.steps.time_s})
    return found


def parquet_table(gpu: str, points: Sequence[Point], idle_w: float | None, wait_w: float | None) -> Any:
    import pyarrow as pa

    rows: list[dict[str, Any]] = []
    for point in points:
        every = {"gpu": gpu, "batch": point.batch, "power_limit_w": point.power_limit_w}
        every |= {"idle_w": idle_w, "wait_w": wait_w, "out_of_memory": point.steps is None}
        if point.steps is None:
            rows.append({**every, "repeat": 0, "steps": 0})
            continue
        steps = point.steps
        for repeat, block in enumerate(steps.blocks):
            updates = steps.updates * block.time_s / sum(each.time_s for each in steps.blocks)
            more = {"repeat": repeat, "updates": updates, "provenance": steps.provenance}
            rows.append({**every, **asdict(block), **more})
    table = profile_table(rows)
    types = {"provenance": pa.string()}
    for name in _MORE:
        values = pa.array([row.get(name) for row in rows], types.get(name, pa.float64()))
        table = table.append_column(name, values)
    return table


def write_json(path: Path, values: Any) -> None:
    with _whole(path) as part, open(part, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.write("\n")


@contextlib.contextmanager
def _whole(path: Path) -> Any:
    """A file beside `path` that takes its place in the end, or goes."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield name
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
