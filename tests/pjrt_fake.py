"""A plugin in the place of XLA's for CUDA, where JAX looks for plugins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "fakes" / "pjrt.c"


def build_plugin(folder: Path) -> Path:
    """The library, in a folder that may be put on PYTHONPATH."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = folder / "jax_plugins" / "xla_cuda12" / "xla_cuda_plugin.so"
    path.parent.mkdir(parents=True)
    subprocess.run([compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", path, SOURCE], check=True)
    return path
