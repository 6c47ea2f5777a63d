"""Runs of which some figures are given, as if they had been worked out."""

from __future__ import annotations

from collections.abc import Mapping

from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.run import Run, _Levels
from smaragdine.accounting.steps import UntracedStep, at_level
from smaragdine.recording.reader import Recording


def made_run(recording: Recording, footprint: Footprint, untraced: Mapping[str, UntracedStep]) -> Run:
    """One whose traced steps took this, and whose untraced steps took that."""
    run = Run(recording)
    levels = _Levels(run.table, run.steps, untraced)
    vars(run).update(footprint=footprint, step=at_level(footprint, untraced), _levels=levels)
    return run
