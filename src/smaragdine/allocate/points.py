"""The points of a profile that is being made: each is on disk once it is measured, so that a profile goes on
where it was interrupted.

    a10.profile/request.json        what is profiled
    a10.profile/batch32-150W.json   a point, beside its recording and what the program printed
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smaragdine.allocate.profile import profile_table
from smaragdine.allocate.profiling import Block, Steps
from smaragdine.errors import UserError
from smaragdine.files import read_json
from smaragdine.whole import users_file

REQUEST = "request.json"
# Beyond the columns that allocate reads.
_MORE = ("energy_error_j", "updates", "provenance")


_LONGER, _ERRORS = 1.1, 2.0  # when a step is clearly longer than another


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


def disturbed(points: Sequence[Point]) -> list[str]:
    """A remark on points whose steps are clearly longer than those of a larger batch: such a profile makes
    small batches look dear, and `allocate` avoids them."""
    remarks: list[str] = []
    for limit_w in dict.fromkeys(point.power_limit_w for point in points):
        here = [(point, point.steps) for point in points if point.power_limit_w == limit_w and point.steps]
        for (small, slow), (large, fast) in itertools.pairwise(here):
            error_s = math.hypot(slow.time_error_s or 0.0, fast.time_error_s or 0.0)
            if slow.time_s > _LONGER * fast.time_s + _ERRORS * error_s:
                what = f"a step of batch {small.batch} took longer than one of {large.batch} at {limit_w:g} W"
                remarks.append(
                    f"{what}: if something else ran then, remove {small.name}.json and run it again"
                )
    return remarks


def file_stem(name: str) -> str:
    """What the file of a GPU of this name is called."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def claim(folder: Path, request: Mapping[str, Any]) -> None:
    """Take the folder for this request, or go on with it. Raises `UserError` where it is another's."""
    if refuse_other(folder, request):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written", error.strerror or str(error)) from None
    write_json(folder / REQUEST, request)


def refuse_other(folder: Path, request: Mapping[str, Any]) -> bool:
    """Whether the folder is this request's. Raises `UserError` where it is another's."""
    file = folder / REQUEST
    try:
        known: Any = read_json(file)
        differ = [(key, known.get(key), value) for key, value in request.items() if known.get(key) != value]
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UserError(f"{file} cannot be read", error.strerror or str(error)) from None
    except (ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be read", str(error), f"Remove {folder} to begin anew") from None
    for key, was, value in differ:
        why = f"its {key.replace('_', ' ')} was {_words(was)}, not {_words(value)}"
        raise UserError(f"{folder} is of another profile", why, "Remove it, or name another file with -o")
    return True


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def save_point(folder: Path, point: Point) -> None:
    write_json(folder / f"{point.name}.json", asdict(point))


def load_point(folder: Path, batch: int, power_limit_w: float) -> Point | None:
    """None where it was not measured yet."""
    try:
        values: Any = read_json(folder / f"{point_name(batch, power_limit_w)}.json")
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
    if path.suffix == ".json":
        write_json(path, original_shape(points))
        return
    import pyarrow.parquet as pq

    with users_file(path) as part:
        pq.write_table(parquet_table(gpu, points, idle_w, wait_w), part)


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
    with users_file(path) as part, open(part, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.write("\n")
