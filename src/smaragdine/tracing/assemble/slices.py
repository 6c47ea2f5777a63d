"""The slices of time of a program that announced no steps: whether the steps found in them count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from smaragdine.tracing.assemble.coverage import Coverage, coverage_of
from smaragdine.tracing.assemble.kineto_calls import NO_STEPS, REMEDY

_DIFFER = f"{NO_STEPS}, and what the program repeats differs from slice to slice; {REMEDY}"


@dataclass(frozen=True)
class Slice:
    pid: int
    files: tuple[Path, ...]
    meta: dict[str, Any]
    table: pa.Table
    coverage: Coverage


def agreed(slices: Sequence[Slice]) -> list[Slice]:
    """Those that are kept, process by process. Steps count where all slices that could tell found the same;
    what came before them is then no step: it was compiling, or being prepared."""
    kept: list[Slice] = []
    for pid in dict.fromkeys(each.pid for each in slices):
        mine = [each for each in slices if each.pid == pid]
        found = [each for each in mine if each.coverage.found_steps]
        differ = len({each.coverage.found_of for each in found}) > 1
        if found and (differ or any(each.coverage.irregular for each in mine)):
            kept += [_without_steps(each) if each.coverage.found_steps else each for each in mine]
        else:
            kept += found or mine
    return kept


def _without_steps(one: Slice) -> Slice:
    at = one.table.schema.get_field_index("step")
    none = pa.nulls(one.table.num_rows, one.table.schema.field(at).type)
    table = one.table.set_column(at, one.table.schema.field(at), none)
    return replace(one, table=table, coverage=coverage_of(table, 0, [*one.coverage.slice_remarks, _DIFFER]))
