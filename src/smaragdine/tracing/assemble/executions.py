"""Which step an operation of an XLA program belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from smaragdine.arrays import Ints
from smaragdine.tracing.assemble.coverage import (
    NO_STEP,
    steps_at,
)
from smaragdine.tracing.assemble.hlo import Program
from smaragdine.tracing.assemble.names import Name
from smaragdine.tracing.assemble.xplane_rows import Rows

# Of the busy time: a program that has less is no training step, nor part of one.
_LEAST_OF_A_STEP, _LEAST_BESIDE_IT = 0.1, 0.01


def with_runs(events: Rows, programs: Mapping[int, Program]) -> Rows:
    """The same events, those of a GPU with the run they are of. The profiler does not say it, but a program
    runs its instructions in the order of its schedule: another run begins where that begins anew."""
    rows = list(events.rows)
    kernels: dict[tuple[str, int], list[int]] = {}
    for number, row in enumerate(rows):
        if row.program in programs and row.run is None and row.program is not None and row.launch is not None:
            kernels.setdefault((events.devices[number], row.program), []).append(number)
    for (_, program), numbers in kernels.items():
        place = {each.name: at for at, each in enumerate(programs[program].order)}
        run, last = 1, -1
        for number in sorted(numbers, key=lambda one: events.start_ns[one]):
            at = place.get(rows[number].operation, last)
            if at < last and 2 * (last - at) >= len(place) - 1:
                run += 1
            last = at
            rows[number] = replace(rows[number], run=run)
    return replace(events, rows=rows) if kernels else events


@dataclass(frozen=True)
class Steps:
    found: Ints  # per event; NO_STEP: of none
    count: int
    spans: tuple[tuple[int, int, int], ...] = ()  # of those that nobody announced: index, begin_ns, end_ns
    remarks: tuple[str, ...] = ()


def marked_steps(events: Rows, names: list[Name], meta: dict[str, Any]) -> Steps:
    """By time where the program waits for its work. XLA's runs behind it: what counts is when it was handed
    over. The input is made ahead: of no step."""
    found = steps_at(np.array(events.start_ns, dtype=np.int64), meta)
    indices: list[int] = [step[0] for step in meta["steps"]]
    for module, executions in _asynchronous(events, names):
        dispatched_ns = events.dispatched_ns.get(module, [])
        if dispatched_ns and len(executions) % len(dispatched_ns) == 0:
            steps: list[int] = steps_at(np.array(dispatched_ns, dtype=np.int64), meta).tolist()
        else:
            # The profiler may have run for one step more than was asked for.
            steps = [*indices, NO_STEP] if len(executions) % (len(indices) + 1) == 0 else indices
            if not steps or len(executions) % len(steps):
                continue
        for i, numbers in enumerate(executions):
            found[numbers] = steps[i * len(steps) // len(executions)]
    found[np.array([row.is_input for row in events.rows], dtype=np.bool_)] = NO_STEP
    return Steps(found, len(indices))


def _asynchronous(events: Rows, names: list[Name]) -> Iterator[tuple[str, list[list[int]]]]:
    """Module → its executions on a device in order of time, each the numbers of its events; where the
    profiler does not tell one run from another, each kernel of it by itself."""
    runs: dict[tuple[str, str], dict[Any, list[int]]] = {}
    for number, (row, device) in enumerate(zip(events.rows, events.devices, strict=True)):
        if row.program is not None and row.run is not None:
            runs.setdefault((device, row.module), {}).setdefault((row.program, row.run), []).append(number)
        elif row.program is not None and device != "cpu:0":
            key = f"{device} {row.program} {row.text} {names[number]}"
            runs.setdefault((key, row.module), {})[number] = [number]
    for (_, module), by_run in runs.items():
        executions = list(by_run.values())
        yield module, sorted(executions, key=lambda each: min(events.start_ns[number] for number in each))


@dataclass(frozen=True)
class _Execution:
    start_ns: int
    end_ns: int
    numbers: list[int]


def sliced_steps(events: Rows) -> Steps:
    """Nobody announced steps. Where one compiled program runs again and again, its executions are the steps:
    each reaches to the next one's beginning. Those that the slice's edges cut are dropped.

    Of several programs that take turns (gradients, gradients, update) the rarest counts.
    """
    found = np.full(len(events.rows), NO_STEP, dtype=np.int64)
    start_ns = np.array(events.start_ns, dtype=np.int64)
    end_ns = np.array(events.end_ns, dtype=np.int64)
    programs = _executions(events, start_ns, end_ns)
    busy_ns = {key: int((end_ns - start_ns)[_all(runs)].sum()) for key, runs in programs.items()}
    total_ns = sum(busy_ns.values())
    main = [
        key for key, runs in programs.items() if len(runs) > 1 and busy_ns[key] >= _LEAST_OF_A_STEP * total_ns
    ]
    if not main:
        return Steps(found, 0)
    chosen = min(main, key=lambda key: (len(programs[key]), -busy_ns[key]))
    runs = programs[chosen]
    alone = total_ns - busy_ns[chosen] < _LEAST_BESIDE_IT * total_ns
    ends_ns = [run.start_ns for run in runs[1:]] + ([runs[-1].end_ns] if alone else [])
    steps = tuple((i, runs[i].start_ns, end) for i, end in enumerate(ends_ns))
    found[:] = steps_at(start_ns, {"steps": steps})
    for i in range(len(steps)):
        found[runs[i].numbers] = i
    if not alone:
        found[runs[-1].numbers] = NO_STEP
    said = f"no steps were announced: those are the executions of {chosen[1]} that lay whole in the window"
    return Steps(found, len(steps), steps, (said,))


def _executions(events: Rows, start_ns: Ints, end_ns: Ints) -> dict[tuple[int, str], list[_Execution]]:
    """(program, module) → its whole executions on all devices, in order of time."""
    runs: dict[tuple[int, str], dict[int, list[int]]] = {}
    for number, row in enumerate(events.rows):
        if row.program is not None and row.run is not None:
            runs.setdefault((row.program, row.module), {}).setdefault(row.run, []).append(number)
    return {
        key: sorted(
            (
                _Execution(int(start_ns[numbers].min()), int(end_ns[numbers].max()), numbers)
                for numbers in _whole(list(by_run.values()), start_ns)
            ),
            key=lambda run: run.start_ns,
        )
        for key, by_run in runs.items()
    }


def _whole(runs: list[list[int]], start_ns: Ints) -> list[list[int]]:
    """Without the first and the last where the profiler did not see all of them."""
    runs = sorted(runs, key=lambda numbers: int(start_ns[numbers].min()))
    usual = Counter(len(numbers) for numbers in runs).most_common(1)[0][0] if len(runs) > 2 else 0
    begin = 1 if runs and len(runs[0]) < usual else 0
    end = len(runs) - 1 if len(runs) > 1 and len(runs[-1]) < usual else len(runs)
    return runs[begin:end]


def _all(runs: list[_Execution]) -> list[int]:
    return [number for run in runs for number in run.numbers]
