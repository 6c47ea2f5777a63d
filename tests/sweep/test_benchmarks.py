"""The benchmarks of experiments/gpyjoules run on a CPU, and their experiment files are right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smaragdine.sweep.experiment import read_experiments, words_of
from smaragdine.sweep.plan import command_words, make_plan

FOLDER = Path(__file__).parents[2] / "experiments" / "gpyjoules"
FILES = sorted(FOLDER.glob("*.yaml"))
QUICK = {
    "mnist.py": ["--width", "32"],
    "ecg.py": ["--blocks", "2", "--batch", "2"],
    "bert.py": ["--size", "tiny", "--batch", "2", "--precision", "bf16"],
}
NEEDS = {"mnist.py": "keras", "ecg.py": "keras", "bert.py": "transformers"}


def test_the_benchmarks_of_the_report_are_there() -> None:
    assert {path.stem for path in FILES} >= {"mnist-small", "mnist-big", "ecg", "bert"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_experiment_file_makes_a_plan(path: Path) -> None:
    plan = make_plan(read_experiments(path).experiments, 1)
    for task in plan.tasks:
        benchmark = plan.benchmark(task)
        words = command_words(benchmark, task.setting)
        assert (Path(benchmark.folder) / words[0]).is_file()
        assert not any("{" in word for word in words)
        assert words_of(benchmark.command)[0] in QUICK


@pytest.mark.parametrize("script", QUICK)
def test_a_benchmark_trains(script: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip(NEEDS[script])
    words = [sys.executable, str(FOLDER / script), "--epochs", "2", "--steps", "1", *QUICK[script]]
    environment = {**os.environ, "KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
