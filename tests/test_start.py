"""What starting a command costs, by what it loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli import smaragdine


def test_a_command_does_not_load_pandas_and_a_plug_in_may(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    done = smaragdine("run", "-o", "run", "--", "true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "plug_in.py").write_text("import pandas\nloaded = pandas.DataFrame({'a': [1]})\n")
    code = """
import os, runpy, sys
ended = os._exit

def at_the_end(code):
    # What PyArrow makes of lists was made without; who asks for it has it.
    assert "pyarrow" in sys.modules and "pandas" not in sys.modules
    import plug_in
    assert "pandas" in sys.modules and len(plug_in.loaded) == 1
    ended(code)

os._exit = at_the_end
sys.argv = ["smaragdine", "show", "run"]
runpy.run_module("smaragdine", run_name="__main__")
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "true" in shown.stdout
