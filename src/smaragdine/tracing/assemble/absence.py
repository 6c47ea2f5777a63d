"""Why a run that was to be traced has no events."""

from __future__ import annotations

import json
from typing import Any

from smaragdine.recording.reader import Recording


def why_nothing(recording: Recording, skip: int, budget: float | None) -> str | None:
    """None where something was traced, or the program's hook has said what went wrong."""
    names: list[str] = recording.marks["name"].to_pylist()
    if recording.windows.num_rows or "hook_error" in names:
        return None
    steps, skipped = names.count("step_end"), max(skip, 1)
    if not steps:
        why = "the program announced none, and was too short for a slice of time or used no framework we know"
    elif steps <= skipped:
        why = f"the program announced {steps}, and {skipped} are skipped first"
    elif budget is not None:
        why = f"{budget * 100:.3g}% of the time of {steps} steps is too little to start a profiler in"
    else:
        why = f"none of the {steps} steps came after those that were skipped"
    return f"no step was traced: {why}"


def hook_errors(recording: Recording) -> list[str]:
    """What went wrong in the program's processes, as they said it."""
    marks: list[dict[str, Any]] = recording.marks.to_pylist()
    details = [json.loads(mark["detail"]) for mark in marks if mark["name"] == "hook_error"]
    return [f"{detail.get('framework')}: {detail.get('error')}" for detail in details]
