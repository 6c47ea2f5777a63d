"""Why a run that was to be traced has no events."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pyarrow as pa

from smaragdine.recording.reader import Recording
from smaragdine.tracing.assemble.kineto_calls import NO_STEPS, REMEDY
from smaragdine.tracing.hook.install import FRAMEWORKS
from smaragdine.tracing.hook.windows import Settings
from smaragdine.units import seconds

_QUIET_S = Settings("").quiet_s
# CPU time of a process that loaded a framework and did more than that: with what is built on it, to load one
# takes up to 3.5 s.
_LEAST_CPU_S = 6.0


def why_nothing(
    recording: Recording, skip: int, budget: float | None, quiet_s: float = _QUIET_S
) -> str | None:
    """None where something was traced, or the program's hook has said what went wrong."""
    names: list[str] = recording.marks["name"].to_pylist()
    if recording.windows.num_rows or "hook_error" in names:
        return None
    steps, skipped = names.count("step_end"), max(skip, 1)
    if not steps:
        if using(recording.marks):
            return no_steps(_duration_s(recording), quiet_s)
        why = "the program announced none, and used no framework we know"
    elif steps <= skipped:
        why = f"the program announced {steps}, and {skipped} are skipped first"
    elif budget is not None:
        why = f"{budget * 100:.3g}% of the time of {steps} steps is too little to start a profiler in"
    else:
        why = f"none of the {steps} steps came after those that were skipped"
    return f"no step was traced: {why}"


def computed_without_steps(recording: Recording) -> bool:
    """Whether the program used a framework, and not only loaded it, and nobody announced a step."""
    processes = using(recording.marks)
    cpu_s: float = recording.info.get("program_cpu_s") or 0.0
    announced = "step_end" in recording.marks["name"].to_pylist()
    return bool(processes) and not announced and cpu_s >= _LEAST_CPU_S * processes


def why_no_operations(marks: pa.Table, duration_s: float) -> str:
    """The same of a recording alone, which does not have the options of its run."""
    names: list[str] = marks["name"].to_pylist()
    if "hook_error" in names:
        return "nothing was traced"  # and what went wrong stands among the problems
    if not using(marks):
        return "nothing was traced (smaragdine run traces where a framework is used)"
    steps = names.count("step_end")
    if not steps:
        return f"nothing was traced: {no_steps(duration_s)}"
    return (
        f"nothing was traced: of {steps} announced step{'' if steps == 1 else 's'} smaragdine run skips the "
        f"first {Settings('').skip}, or as many as --trace-skip says"
    )


def no_steps(duration_s: float, quiet_s: float = _QUIET_S) -> str:
    longer = f", or let it run longer than {quiet_s:g} s" if duration_s < quiet_s else ""
    return f"{NO_STEPS} in {seconds(duration_s)}; {REMEDY}{longer}"


def using(marks: pa.Table) -> int:
    """How many processes had loaded a framework that we trace."""
    count = 0
    for mark in marks.select(["name", "detail"]).to_pylist():
        if mark["name"] == "libraries":
            with contextlib.suppress(ValueError, TypeError):
                count += any(name in json.loads(mark["detail"]) for name in FRAMEWORKS)
    return count


def hook_errors(recording: Recording) -> list[str]:
    """What went wrong in the program's processes, as they said it."""
    marks: list[dict[str, Any]] = recording.marks.to_pylist()
    details = [json.loads(mark["detail"]) for mark in marks if mark["name"] == "hook_error"]
    return [f"{detail.get('framework')}: {detail.get('error')}" for detail in details]


def _duration_s(recording: Recording) -> float:
    return (recording.info["end_ns"] - recording.info["begin_ns"]) * 1e-9
