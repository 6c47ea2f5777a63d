"""What is asked of the hook, by the environment of the program that loads it or by that program itself."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .state import process

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")

FOLDER = "SMARAGDINE_TRACE_FOLDER"
STEPS = "SMARAGDINE_TRACE_STEPS"
SKIP = "SMARAGDINE_TRACE_SKIP"
BUDGET = "SMARAGDINE_TRACE_BUDGET"
QUIET = "SMARAGDINE_TRACE_QUIET_S"


def environment(spool_dir: str, run_id: str, base: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to `base`, or change in it, so that every Python of the program has the hook."""
    # An empty PYTHONPATH means none, an empty entry in one the current folder: append only what is there.
    old = base.get("PYTHONPATH", "")
    return {
        "PYTHONPATH": SITE + os.pathsep + old if old else SITE,
        "SMARAGDINE_SPOOL": os.path.abspath(spool_dir),
        "SMARAGDINE_RUN_ID": run_id,
    }


def trace_environment(folder: str, steps: int, skip: int, budget: float | None = None) -> dict[str, str]:
    """The variables to add so that every process traces `steps` of its steps after `skip` others; tracing
    takes no more than the part `budget` of the time."""
    return {
        FOLDER: os.path.abspath(folder),
        STEPS: str(steps),
        SKIP: str(skip),
        BUDGET: "" if budget is None else repr(budget),
    }


class TraceSettings:
    def __init__(self, folder, steps=10, skip=10, budget=None, quiet_s=15.0):
        self.folder = folder
        self.steps = steps  # 0: all
        self.skip = skip
        self.budget = budget  # the part of the time so far that tracing may cost; None: any
        self.quiet_s = quiet_s  # without a step for this long, a program is taken to have none


def settings_of(environ):
    """None where nothing is to be traced."""
    if not environ.get(FOLDER):
        return None
    budget = environ.get(BUDGET)
    return TraceSettings(
        environ[FOLDER],
        int(environ.get(STEPS, "10")),
        int(environ.get(SKIP, "10")),
        float(budget) if budget else None,
        float(environ.get(QUIET, "15")),
    )


def trace_wanted():
    """Whether this process may be traced, so that names are worth some care."""
    return process.trace.asked or bool(os.environ.get(FOLDER))


def ask_for_trace():
    """By the program's own code: it may be traced from now on."""
    process.trace.asked = True
