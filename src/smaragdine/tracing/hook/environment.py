"""The environment in which a program loads the hook."""

from __future__ import annotations

import os
from typing import Mapping

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")


def trace_environment(folder: str, steps: int, skip: int, budget: float | None = None) -> dict[str, str]:
    """The variables to add so that every process traces `steps` of its steps after `skip` others; tracing
    takes no more than the part `budget` of the time."""
    return {
        "SMARAGDINE_TRACE_FOLDER": os.path.abspath(folder),
        "SMARAGDINE_TRACE_STEPS": str(steps),
        "SMARAGDINE_TRACE_SKIP": str(skip),
        "SMARAGDINE_TRACE_BUDGET": "" if budget is None else repr(budget),
    }


def environment(spool_dir: str, run_id: str, base: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to `base`, or change in it, so that every Python of the program has the hook."""
    # An empty PYTHONPATH means none, but an empty entry in one means the current folder: append only what is
    # there.
    old = base.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": SITE + os.pathsep + old if old else SITE,
        "SMARAGDINE_SPOOL": os.path.abspath(spool_dir),
        "SMARAGDINE_RUN_ID": run_id,
    }
