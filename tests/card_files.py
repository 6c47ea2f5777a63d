"""Loads the files that run in the program's interpreter as it does: by their paths."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import smaragdine.calibrate

FOLDER = Path(smaragdine.calibrate.__path__[0])


def load_card(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
