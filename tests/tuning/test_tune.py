"""`smaragdine tune` against a simulated GPU, with a program whose steps depend on the limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli import alive, children, finish, info, smaragdine, start, wait_for, write_script
from daemon_fake import a_machine
from nvml_fake import nvml_environment, settings_now, write_spec
from smaragdine.recording.reader import open_recording
from sweep_bench import DEFAULT_MW, GPU, Bench, make_bench

# The GPU draws its limit, so energy is least at 300 W, and once `changed` is there at 150 W. It works on
# while the program is held up: what is due does not move.
PROGRAM = """
import os, sys, time
import pynvml
import smaragdine

pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
print("begins", flush=True)
step = 0
due_s = time.time()
while not os.path.exists("stop"):
    work = 0.125 if os.path.exists("changed") else 1.0
    limit_w = pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000
    due_s += 0.020 * (1 + work / 2 * (300 / limit_w) ** 3)
    time.sleep(max(0.0, due_s - time.time()))
    smaragdine.mark("step_end", step)
    step += 1
print("ends")
sys.exit(3)
"""
QUICK = ["--settle-s", "0.1", "--skip", "1"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    write_script(tmp_path / "train.py", PROGRAM)
    return make_bench(tmp_path)


@contextmanager
def tuning(bench: Bench, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The command at work; whatever fails, the program ends."""
    process = start("tune", *QUICK, "-o", "out", *words, "--", "train.py", env=bench.env, cwd=bench.folder)
    try:
        yield process
    finally:
        (bench.folder / "stop").touch()
        if process.poll() is None:
            finish(process)


def marks(bench: Bench, name: str) -> list[dict[str, Any]]:
    """Of the tuner, while it is at work."""
    (path,) = [*(bench.folder / "out").glob("*/marks-tune.jsonl")] or [None]
    lines = path.read_text().splitlines(keepends=True) if path is not None else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [mark for mark in found if mark["name"] == name]


def settled(bench: Bench, process: subprocess.Popen[str], times: int) -> list[float]:
    wait_for(lambda: len(marks(bench, "tune_settled")) >= times or process.poll() is not None)
    return [mark["detail"]["limit_w"] for mark in marks(bench, "tune_settled")]


def tuner_of(process: subprocess.Popen[str]) -> int:
    def find() -> int | None:
        for pid in children(process.pid):
            if b"smaragdine.tuning.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None

    return wait_for(find)


def test_finds_the_optimum_notices_that_it_moved_and_finds_the_next(bench: Bench) -> None:
    with tuning(bench, "--power", "450,300,200,100", "--trying", "100%") as process:
        assert settled(bench, process, 1) == [300]
        (bench.folder / "changed").touch()
        # A machine that is busy elsewhere may look like a change of its own in between.
        assert wait_for(lambda: settled(bench, process, 2)[-1] == 200)
        (bench.folder / "stop").touch()
        code, out, err = finish(process)
    assert (code, out) == (3, "begins\nends\n")
    assert bench.restored()
    recording = open_recording(bench.folder / "out")
    assert info(bench.folder / "out")["exit_code"] == 3
    found = json.loads((bench.folder / "out" / "tune.json").read_text())
    assert found["searches"][0]["chosen_w"] == 300
    assert found["searches"][-1]["chosen_w"] == 200
    assert any("step time" in search["why"] for search in found["searches"][1:])
    for search in found["searches"]:
        assert search["tried"][0]["limit_w"] == found["reference_w"] == 700
        for tried in search["tried"]:
            # By the GPU's physics, whatever the machine did to the program's sleep.
            assert tried["power_w"] == pytest.approx(tried["limit_w"], rel=0.05)
            assert tried["energy_j"] == pytest.approx(tried["limit_w"] * tried["time_s"], rel=0.05)
    assert "settled on 300 W: " in err
    assert "settled on 200 W after " in err
    assert "less energy" in err

    # Every change is a mark, and in the telemetry.
    rows = [mark for mark in recording.marks.to_pylist() if mark["name"] == "limit_set"]
    limits_w = [json.loads(row["detail"])["limit_w"] for row in rows]
    # Before the program it is tried whether limits may be set at all; after it they are as before.
    assert bench.set_values() == [DEFAULT_MW, *(1000 * w for w in limits_w), DEFAULT_MW]
    (limit,) = (each for each in recording.series("telemetry") if each.channel.quantity == "power_limit")
    seen = set(limit.value)
    assert {300, 200} <= seen


def test_kill_of_the_command_ends_the_program_and_restores_the_limit(bench: Bench) -> None:
    with tuning(bench, "--power", "300,200") as process:
        assert wait_for(lambda: len(marks(bench, "limit_set")) > 1)
        family = [process.pid, *children(process.pid)]
        process.send_signal(signal.SIGKILL)
        finish(process)
        assert bench.restored()
        assert wait_for(lambda: not any(map(alive, family)))


def test_kill_of_the_tuner_restores_the_limit_and_the_program_goes_on(bench: Bench) -> None:
    with tuning(bench, "--power", "300,200") as process:
        assert wait_for(lambda: len(marks(bench, "limit_set")) > 1)
        os.kill(tuner_of(process), signal.SIGKILL)
        assert bench.restored()
        assert process.poll() is None
        (bench.folder / "stop").touch()
        code, out, err = finish(process)
    assert (code, out) == (3, "begins\nends\n")
    assert "limits: the tuner died" in err
    assert open_recording(bench.folder / "out").info["status"] == "failed"


def test_ctrl_c_is_the_programs_and_limits_are_as_before(bench: Bench) -> None:
    with tuning(bench, "--power", "300,200") as process:
        assert wait_for(lambda: len(marks(bench, "limit_set")) > 1)
        process.send_signal(signal.SIGINT)
        code, _, err = finish(process)
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert bench.restored()
    assert (bench.folder / "out" / "tune.json").exists()


def test_two_gpus_have_the_same_limit(tmp_path: Path) -> None:
    write_script(tmp_path / "train.py", PROGRAM)
    bench = make_bench(tmp_path)
    made = nvml_environment(tmp_path, [GPU, replace(GPU, counter=False)])
    bench.env |= {name: made[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML")}
    with tuning(bench, "--power", "300") as process:
        assert settled(bench, process, 1) == [300]
        assert settings_now(bench.spec) == {(0, "l"): 300_000, (1, "l"): 300_000}
        (bench.folder / "stop").touch()
        finish(process)
    assert settings_now(bench.spec) == {(0, "l"): DEFAULT_MW, (1, "l"): DEFAULT_MW}
    found = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert found["devices"] == ["gpu:0", "gpu:1"]
    assert found["searches"][0]["tried"][0]["power_w"] > 1.5 * 700


def test_through_the_daemon(tmp_path: Path) -> None:
    write_script(tmp_path / "train.py", PROGRAM)
    with a_machine(gpus=[GPU]) as machine, machine.daemon() as daemon:
        bench = make_bench(tmp_path, None)
        bench.env |= {**machine.env, "SMARAGDINE_DAEMON": str(daemon.socket)}
        with tuning(bench, "--power", "300") as process:
            assert settled(bench, process, 1) == [300]
            assert settings_now(bench.spec) == {(0, "l"): 300_000}
        assert bench.restored()
        assert "power limit set to " in daemon.lines()
        assert not (tmp_path / "limits").exists()


def test_no_permission_is_one_line_with_the_remedy_and_nothing_runs(bench: Bench) -> None:
    write_spec(bench.spec, [replace(GPU, set_permission=False)])
    done = smaragdine("tune", "--", "train.py", env=bench.env, cwd=bench.folder)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "limits cannot be set" in done.stderr
    assert "--control-group" in done.stderr
    assert not (bench.folder / "runs").exists()


def test_a_program_without_steps_is_only_recorded(bench: Bench) -> None:
    write_script(bench.folder / "train.py", "print('nothing')\n")
    done = smaragdine("tune", "-o", "out", "train.py", env=bench.env, cwd=bench.folder)
    assert (done.returncode, done.stdout) == (0, "nothing\n")
    assert "limits: no limit was tried: the program ended before enough steps were seen" in done.stderr
    assert bench.set_values() == [DEFAULT_MW]
    assert open_recording(bench.folder / "out").info["status"] == "complete"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--power", "50"], "50 W: outside the device's range. Allowed: 100 to 700 W"),
        (["--power", "700"], "nothing to tune"),
        (["--power", "many"], "not a power above 0 W"),
        (["--devices", "gpu:3"], "there is no gpu:3"),
        (["--eta", "0.3"], "--objective cost"),
        (["--eta", "3", "--objective", "cost"], "not a number from 0 to 1"),
        (["--slowdown", "5%", "--objective", "edp"], "Leave --objective out"),
        (["--objective", "joy"], "invalid choice"),
    ],
)
def test_mistakes_are_one_line(bench: Bench, words: list[str], line: str) -> None:
    done = smaragdine("tune", *words, "--", "train.py", env=bench.env, cwd=bench.folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert line in done.stderr
    assert bench.set_values() == []


def test_without_a_gpu(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, None)
    write_script(tmp_path / "train.py", PROGRAM)
    done = smaragdine("tune", "--", "train.py", env=bench.env, cwd=tmp_path)
    assert done.returncode == 2
    assert "no GPU whose power limit could be tuned" in done.stderr
