"""The programs that a study runs: where they are, and what they need."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from smaragdine.errors import UserError
from smaragdine.recording.command import build_command

_PROGRAMS = {
    "torch": ("torch_bert.py", ("torch", "transformers")),
    "keras-tensorflow": ("keras_bert.py", ("keras", "tensorflow")),
    "keras-jax": ("keras_bert.py", ("keras", "jax")),
    "keras-torch": ("keras_bert.py", ("keras", "torch")),
    "tf1": ("tf1_bert.py", ("tensorflow",)),
}
FRAMEWORKS = tuple(_PROGRAMS)
ENVIRONMENTS = {
    name: {"KERAS_BACKEND": name.removeprefix("keras-")} for name in FRAMEWORKS if name.startswith("keras-")
}
_MISSING = (
    "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
)


def program(framework: str) -> Path:
    """Inside the package where it was installed; beside its sources in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package, package.parents[1]):
        path = folder / "experiments" / "study" / _PROGRAMS[framework][0]
        if path.is_file():
            return path
    raise UserError(f"{_PROGRAMS[framework][0]} is missing", "it is part of Smaragdine", "Install it again")


def check_packages(frameworks: Iterable[str]) -> None:
    """Refuse what the programs' own interpreter cannot import, before anything is run."""
    for framework in frameworks:
        needed = _PROGRAMS[framework][1]
        python = build_command([str(program(framework))], os.environ).executable
        found = subprocess.run([python, "-c", _MISSING, *needed], capture_output=True, text=True, check=False)
        missing = found.stdout.split()
        if missing:
            are = "is" if len(missing) == 1 else "are"
            why = f"{' and '.join(missing)} {are} not installed for {python}"
            remedy = f"Try: {python} -m pip install {' '.join(missing)}"
            raise UserError(f"the study in {framework} cannot run", why, remedy)
