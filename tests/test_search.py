"""`make search`: new examples every time, until one fails, and then how to keep it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import search

FOUND = """
import random

from hypothesis import given, strategies as st
import search

@given(st.integers(0, 10**9))
def test_property(n):
    with open("drawn", "a") as file:
        file.write(f"{n}\\n")
    assert n < BOUND

def test_dice():
    with open("thrown", "a") as file:
        file.write(f"{random.Random(search.seed(3)).random()}\\n")

def test_not_searched(): assert False
"""


def searched(folder: Path, bound: float, *words: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    shutil.copy(here / "conftest.py", folder)
    text = FOUND.replace("BOUND", repr(bound)).replace("def test_dice", "@pytest.mark.search\ndef test_dice")
    (folder / "test_found.py").write_text(f"import pytest\n{text}")
    command = [sys.executable, str(here / "search.py"), *words, str(folder)]
    env = {**os.environ, "PYTHONPATH": str(here)}
    return subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=False)


def test_new_examples_in_every_round_and_the_same_ones_by_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")  # Hypothesis then takes the same ones, unless it is told not to
    drawn: list[list[str]] = []
    thrown: list[list[str]] = []
    for number in ("5", "5", "6"):
        shutil.rmtree(tmp_path / ".hypothesis", ignore_errors=True)
        done = searched(tmp_path, 1e10, "--minutes", "0", "--seed", number)
        assert done.returncode == 0, done.stdout
        drawn.append((tmp_path / "drawn").read_text().splitlines())
        thrown.append((tmp_path / "thrown").read_text().splitlines())
        said = re.fullmatch(rf"round 1 \(seed {number}\): (\d+) examples so far, none fails\n", done.stdout)
        assert said is not None, done.stdout
        assert 0 < int(said[1]) <= len(drawn[-1])
        (tmp_path / "drawn").unlink()
        (tmp_path / "thrown").unlink()
    assert drawn[0] == drawn[1] != drawn[2]
    assert thrown[0] == thrown[1] != thrown[2]


def test_what_fails_is_shown_with_how_to_keep_it(tmp_path: Path) -> None:
    done = searched(tmp_path, 70_000)
    assert done.returncode == 1
    assert "n=70000" in done.stdout
    assert "test_found.py::test_property" in done.stdout
    assert "as @example(…)" in done.stdout
    assert "test_not_searched" not in done.stdout


def test_without_a_search_seeds_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(search.SEED_VARIABLE, raising=False)
    assert search.seed(3) == 3
