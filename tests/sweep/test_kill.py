"""SIGKILL of a sweep at random points: the limit comes back; resumed, the table is that of a whole sweep."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from cli import finish, wait_for
from smaragdine.sweep.table import Repetition, read_results
from sweep_bench import DEFAULT_MW, Bench, make_bench

ROUNDS = 5
WORDS = ["--power", "150,200,250", "--repeat", "2", "--seed", "3", "-o", "sweep", "--", "work.py"]


def told_apart(rows: list[Repetition]) -> list[tuple[object, ...]]:
    """A table without what is measured."""
    return [
        (row.experiment, row.benchmark, row.limit_kind, row.power_limit_w, row.repetition, row.recording,
         row.status, row.device, row.device_name, row.provenance, row.time_s is None, row.energy_j is None)
        for row in rows
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [1])
def test_killed_again_and_again(tmp_path: Path, seed: int) -> None:
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    whole, bench = map(make_bench, folders)
    whole.program("0.05")
    bench.program("0.05")
    dice = random.Random(seed)
    known = 0
    while_set: list[bool] = []
    for number in range(ROUNDS):
        while_set.append(kill_once(bench, dice, at_limit=number % 2 == 0))
        assert bench.restored()
        rows = read_results(bench.sweep) if (bench.sweep / "results.parquet").exists() else []
        assert len(rows) >= known
        known = len(rows)
    assert any(while_set)
    done = bench.run(*WORDS)
    assert done.returncode == 0, done.stderr
    assert bench.restored()
    done = whole.run(*WORDS)
    assert done.returncode == 0, done.stderr
    assert told_apart(read_results(bench.sweep)) == told_apart(read_results(whole.sweep))


def test_killed_together_with_its_keeper(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    bench.program("60")
    process = bench.start("--power", "150", "-o", "sweep", "--", "work.py")
    assert wait_for(lambda: list(bench.folder.glob("ran-*")) or process.poll() is not None)
    keeper = keeper_of(process.pid)
    # Stopped, it cannot see the other's end before its own.
    os.kill(keeper, signal.SIGSTOP)
    process.kill()
    os.kill(keeper, signal.SIGKILL)
    finish(process)
    assert bench.restored()
    assert bench.set_values()[-2:] == [150_000, DEFAULT_MW]


def keeper_of(pid: int) -> int:
    """A child of one of the sweep's threads, as the one that stands by is not: that still is a shell."""
    below = [Path(f"/proc/{child}") for path in Path(f"/proc/{pid}/task").glob("*/children")
             for child in path.read_text().split()]  # fmt: skip
    (keeper,) = [
        int(path.name)
        for path in below
        if (words := (path / "cmdline").read_bytes().split(b"\0"))[0] != b"/bin/sh"
        and b"smaragdine.limits.keeper" in words
    ]
    return keeper


def kill_once(bench: Bench, dice: random.Random, *, at_limit: bool) -> bool:
    """SIGKILL, in every second round once a repetition's limit is set; whether one was set just then."""
    process = bench.start(*WORDS)
    if at_limit:
        before = len(bench.set_values())
        # Three limits are tried first and brought back; what is set after that is a repetition's.
        wait_for(lambda: len(bench.set_values()) > before + 4 or process.poll() is not None)
    time.sleep(dice.uniform(0.0, 1.5 if at_limit else 3.0))
    process.send_signal(signal.SIGKILL)
    was_set = bench.set_values()[-1:] not in ([], [DEFAULT_MW])
    finish(process)
    return was_set
