"""Why a run that was to be traced has no events."""

from __future__ import annotations

import contextlib
import json

import pyarrow as pa

from smaragdine.arrow import pc
from smaragdine.errors import signal_name
from smaragdine.recording.asked import trace_of, verb_of
from smaragdine.recording.reader import Recording
from smaragdine.tracing.hook.install import FRAMEWORKS
from smaragdine.tracing.kineto.places import NO_STEPS, REMEDY
from smaragdine.units import seconds

# A process with more CPU time than this did more than load a framework: loading one, with what is built on
# it, takes up to 3.5 s.
_LEAST_CPU_S = 6.0


def why_nothing(recording: Recording) -> str | None:
    """None if something was traced, if the hook has said what went wrong, or if nobody knows why."""
    if recording.windows.num_rows or _details_of_errors(recording.marks):
        return None
    why = _why(recording)
    return why if why is None or why.startswith(NO_STEPS) else f"no step was traced: {why}"


def why_no_operations(recording: Recording) -> str:
    """The same for somebody who looks at the recording later."""
    if lost := recording.lost("events"):
        return lost
    if lost := recording.lost("marks"):
        return f"nothing was traced, and nobody can tell why: {lost}"
    # What went wrong in the program's processes stands among the problems.
    known = not _details_of_errors(recording.marks)
    why = _why(recording) if known and not recording.windows.num_rows else None
    return f"nothing was traced: {why}" if why else "nothing was traced"


def computed_without_steps(recording: Recording) -> bool:
    """Whether the program used a framework, rather than only loading it, and nobody announced a step. A
    program that did not come to its end has something else to say."""
    processes = using(recording.marks)
    cpu_s: float = recording.info.get("program_cpu_s") or 0.0
    announced = "step_end" in recording.marks["name"].to_pylist()
    ended = recording.status == "complete"
    return ended and bool(processes) and not announced and cpu_s >= _LEAST_CPU_S * processes


def _why(recording: Recording) -> str | None:
    """What was asked for and recorded tells why; None if it does not."""
    trace = trace_of(recording.info)
    if trace is None:
        return None
    if not trace.on:
        off = verb_of(recording.info) == "run"
        return "it was recorded with --trace off" if off else "it was recorded without tracing"
    marks = recording.marks
    steps, skipped = recording.announced_steps, max(trace.skip, 1)
    if recording.status == "running":
        return f"it is still running; {_few(marks, steps, skipped)}"
    if recording.status in ("killed", "interrupted"):
        number = recording.info.get("signal")
        how = (
            f"the program was killed by {signal_name(number)}" if number else "its recording was interrupted"
        )
        return f"{how}, and what was announced or traced last is lost; {_few(marks, steps, skipped)}"
    code = recording.info.get("exit_code")
    if code:
        return f"the program ended with exit code {code}; {_few(marks, steps, skipped)}"
    if not steps and using(marks):
        return no_steps(_duration_s(recording), trace.quiet_s)
    if not steps:
        return "no steps were announced, and no process told of a framework that is traced"
    if steps <= skipped:
        return _few(marks, steps, skipped)
    if trace.budget is not None:
        return f"{trace.budget * 100:.3g}% of the time of {steps} steps is too little to start a profiler in"
    return f"{_few(marks, steps, skipped)}; why none of the others was is not known"


def _few(marks: pa.Table, steps: int, skipped: int) -> str:
    """What we know of the steps. A framework's marks wait a moment before they are written, and are lost if
    the process leaves at once: only one that has told of its libraries left in order."""
    if not steps:
        return "no step had been announced" if using(marks) else "no announced step is recorded"
    lost = not using(marks) and not _by_hand(marks)
    return (
        f"{'at least ' if lost else ''}{steps} step{'' if steps == 1 else 's'} had been announced, and the "
        f"first {'one is' if skipped == 1 else f'{skipped} are'} not traced"
    )


def _by_hand(marks: pa.Table) -> bool:
    rows = marks.select(["name", "source"]).to_pylist()
    return all(row["source"] == "user" for row in rows if row["name"] == "step_end")


def no_steps(duration_s: float, quiet_s: float) -> str:
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
    """What went wrong in the program's processes, in their own words."""
    details = [json.loads(detail) for detail in _details_of_errors(recording.marks)]
    return [f"{detail.get('framework')}: {detail.get('error')}" for detail in details]


def what_is_incomplete(marks: pa.Table) -> list[str]:
    """What a recording lacks because of that."""
    return [_problem(detail) for detail in _details_of_errors(marks)]


def _problem(detail: str) -> str:
    try:
        framework, error = (json.loads(detail)[key] for key in ("framework", "error"))
    except (ValueError, KeyError, TypeError):
        return f"marks may be incomplete: {detail}"
    if framework == "trace":
        # What the hook itself raises is a sentence.
        why = error.removeprefix("RuntimeError: ").removeprefix("NotImplementedError: ")
        return f"nothing more could be traced: {why}"
    return f"marks of {framework} may be incomplete: {error}"


def _details_of_errors(marks: pa.Table) -> list[str]:
    ours = (pc.field("name") == "hook_error") & (pc.field("source") != "user")
    return marks.filter(ours)["detail"].to_pylist()


def _duration_s(recording: Recording) -> float:
    begin_ns, end_ns = (recording.info.get(name) or 0 for name in ("begin_ns", "end_ns"))
    return (end_ns - begin_ns) * 1e-9
