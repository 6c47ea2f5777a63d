"""`smaragdine profile`: programs that announce steps, on simulated GPUs and counters of known power."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import recordings
from cli import alive, finish, smaragdine, start, wait_for, write_script
from nvml_fake import GpuSpec, in_process, nvml_environment, settings_made, settings_now, write_spec
from powercap_fake import PowercapTree
from refusal import refused
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.run import Run
from smaragdine.allocate.device import (
    ProfiledPoint,
    disturbed,
    load_point,
    original_shape,
    save_point,
    write_profile,
)
from smaragdine.allocate.profile import read_profile
from smaragdine.allocate.profiler import (
    Announced,
    ProfiledSteps,
    StepBlock,
    mean_power_w,
    refuse_gaps,
    steps_of,
    update_period_s,
)
from smaragdine.cli.main import main
from smaragdine.recording.reader import open_recording
from smaragdine.sensors.base import Channel

LIMIT, DEFAULT_MW = "l", 700_000

# A step takes as many milliseconds as the batch has samples. As in a training, there are more than needed.
TRAIN = """
    import sys, time
    import smaragdine

    batch = int(sys.argv[1])
    if batch >= 64:
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", file=sys.stderr)
        sys.exit(1)
    for step in range(100_000):
        time.sleep(batch / 1000)
        smaragdine.mark("step_end", step)
"""


NO_CUDA = "raise RuntimeError('no CUDA here')"
SPINS = """
    import os, time

    class cuda:
        init = synchronize = staticmethod(lambda: None)
        get_device_properties = staticmethod(lambda n: object())
        _sleep = staticmethod(lambda cycles: time.sleep(0.05))

    open(os.environ["CUDA_VISIBLE_DEVICES"] + ".spun", "w")
"""


@pytest.fixture(scope="module", autouse=True)
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Started]]:
    """Two that mostly wait for counters: they do so while the other tests run."""
    small = GpuSpec(name="NVIDIA Fake T4", high_w=60.0, limit_default_w=70.0, limit_max_w=70.0, counter=False)
    several = [GpuSpec(high_w=250.0, counter=False), small, small]
    started = {
        "counter": begin(
            tmp_path_factory.mktemp("counter"), [GpuSpec(high_w=250.0)], NO_CUDA, "--steps", "1"
        ),
        "models": begin(tmp_path_factory.mktemp("models"), several, SPINS, "-o", "profiles/"),
    }
    yield started
    for each in started.values():
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
        each.process.communicate()


@dataclass(frozen=True)
class Started:
    process: subprocess.Popen[str]
    folder: Path
    environment: dict[str, str]


def begin(folder: Path, gpus: list[GpuSpec], torch: str, *words: str) -> Started:
    env = {**gpu_environment(folder, gpus, torch), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    write_script(folder / "train.py", TRAIN)
    command = ("profile", "--batches", "5", *words, "--", "train.py", "{batch}")
    return Started(start(*command, env=env, cwd=folder), folder, env)


def gpu_environment(folder: Path, gpus: list[GpuSpec], torch: str) -> dict[str, str]:
    """With a PyTorch of our own: importing the real one takes seconds, and there is no CUDA here."""
    (folder / "fake").mkdir()
    write_script(folder / "fake" / "torch.py", torch)
    more = {
        "PYTHONPATH": str(folder / "fake"),
        "SMARAGDINE_LIMITS_JOURNAL": str(folder / "limits" / "journal"),
    }
    return {**nvml_environment(folder, gpus), **more}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path / "train.py", TRAIN)
    return tmp_path


@pytest.fixture
def cpu(here: Path) -> Iterator[dict[str, str]]:
    """A processor that draws 50 W, of at most 65 W."""
    with PowercapTree(here / "powercap", packages=1, dram=False, core=False) as tree:
        (tree.zones["intel-rapl:0"] / "constraint_0_power_limit_uw").write_text("65000000\n")
        tree.start({"cpu:0": 50.0})
        yield {"SMARAGDINE_POWERCAP_ROOT": str(tree.root), "LD_LIBRARY_PATH": ""}


@pytest.fixture
def gpu(here: Path) -> dict[str, str]:
    """A GPU that would draw 300 W, without a counter: it has a new value every 20 ms."""
    return gpu_environment(here, [GpuSpec(counter=False)], NO_CUDA)


def rows(file: Path) -> list[dict[str, Any]]:
    return pq.read_table(file).to_pylist()


def test_steps_of_a_recording(tmp_path: Path) -> None:
    """Steps of 100 ms, by turns at 200 and 100 W; one has the end of an epoch in it."""
    recording = open_recording(recordings.make(tmp_path / "run", events=False))
    found = steps_of(Run(recording), "gpu:0", 4, 2)
    assert [(block.steps, round(block.time_s, 9)) for block in found.blocks] == [(7, 0.7), (6, 0.6)]
    assert [round(block.energy_j, 9) for block in found.blocks] == [110, 90]
    assert (found.count, round(found.time_s, 9), found.provenance) == (13, 0.1, "measured")
    assert found.energy_j == pytest.approx(200 / 13, rel=1e-9)
    assert found.updates == pytest.approx(65)
    # Means per step of 110/7 and 90/6 J: their standard error is half their difference.
    assert found.energy_error_j == pytest.approx((110 / 7 - 90 / 6) / 2)
    assert found.blocks[0].energy_error_j == pytest.approx(110 / 0.7 * 0.02 / math.sqrt(6))
    assert found.time_error_s == pytest.approx(0, abs=1e-12)
    processor = steps_of(Run(recording), "cpu:0", 0, 5)
    assert processor.energy_j == pytest.approx(4)
    assert (processor.count, processor.provenance) == (16, "estimated")
    assert processor.updates == pytest.approx(16)
    # Constant power spreads over nothing, but where a block begins is known to one update only.
    assert processor.energy_error_j == pytest.approx(40 * 0.1 / math.sqrt(6) / 16)
    assert mean_power_w(
        Run(recording), "gpu:0", recordings.T0, recordings.T0 + recordings.S
    ) == pytest.approx(10)
    refused(lambda: steps_of(Run(recording), "gpu:1", 4, 2), "nothing of gpu:1")
    refused(lambda: steps_of(Run(recording), "gpu:0", 40, 2), "no steps after the first 40")


def test_what_was_not_measured_is_refused(tmp_path: Path) -> None:
    silent = Run.open(recordings.make(tmp_path / "silent", power=False))
    refused(lambda: steps_of(silent, "gpu:0", 0, 5), "nothing of gpu:0")
    half = PowerTrace(np.array([0]), np.array([50 * recordings.MS]), np.array([100.0]))
    vars(silent)["traces"] = {"gpu:0": half}
    spans = np.array([[0, 100 * recordings.MS]])
    refused(lambda: refuse_gaps(silent, spans, "gpu:0"), "50.0 ms of gpu:0 are missing")
    refuse_gaps(silent, spans // 2, "gpu:0")


def test_update_period() -> None:
    def channel(quantity: str, period_ms: float, device: str = "gpu:0", detail: str = "") -> Channel:
        return Channel(device, quantity, "J", "counter", "measured", period_ms, "nvml", detail=detail)

    assert update_period_s([channel("power", 20), channel("energy", 100)], "gpu:0") == 0.1
    anchors = channel("energy", 2000, detail="the energy counter; counter steps every 90 ms; each reading …")
    assert update_period_s([channel("power", 20), anchors], "gpu:0") == 0.09
    assert update_period_s([channel("power", 20)], "gpu:0") == 0.02
    assert update_period_s([channel("energy", 1)], "gpu:0") == 0.004  # it is read so often
    assert update_period_s([channel("energy", 1, "gpu:1")], "gpu:0") is None


def test_marks_are_taken_as_they_come(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    file, announced = spool / "marks-7.jsonl", Announced(tmp_path)

    def line(t_ns: int, name: str = "step_end", pid: int = 7) -> str:
        return json.dumps({"t_ns": t_ns, "name": name, "pid": pid, "source": "torch"})

    assert announced.look() == []
    file.write_text(f"{line(1)}\n{line(2, 'epoch_end')}\n{line(3)[:20]}")
    assert announced.look() == [1]
    with file.open("a") as more:
        more.write(f"{line(3)[20:]}\nnonsense step_end\n")
    assert announced.look() == [1, 3]
    (spool / "marks-8.jsonl").write_text("".join(f"{line(t, pid=8)}\n" for t in range(3)))
    assert announced.look() == [0, 1, 2]
    assert announced.look() == [0, 1, 2]


def test_points_come_back_as_they_were(tmp_path: Path) -> None:
    steps = ProfiledSteps((StepBlock(10, 1.0, 20.0, 0.5), StepBlock(10, 1.2, 22.0, 0.5)), 55.0, "measured")
    for point in (ProfiledPoint(32, 150.5, steps), ProfiledPoint(64, 150.5, None)):
        save_point(tmp_path, point)
        assert load_point(tmp_path, point.batch, 150.5) == point
    assert load_point(tmp_path, 128, 150.5) is None
    points = [
        ProfiledPoint(16, 150.5, steps),
        ProfiledPoint(32, 150.5, steps),
        ProfiledPoint(64, 150.5, None),
    ]
    assert original_shape(points)["16"] == [
        {"power_limit": 150.5, "energy": 42 / 20, "time": (1.0 + 1.2) / 20}
    ]
    for name in ("a.parquet", "a.json"):
        write_profile(tmp_path / name, "a", points, 20.0, None)
        profile = read_profile(tmp_path / name, "a")
        assert profile.batches == (16, 32)
        point = profile.points[16, 150.5]
        assert (point.time_s, point.energy_j) == (pytest.approx(0.11), pytest.approx(2.1))
    profile = read_profile(tmp_path / "a.parquet", "a")
    assert (profile.out_of_memory, profile.idle_w, profile.wait_w) == ((64,), 20.0, None)
    assert profile.points[16, 150.5].time_variance == pytest.approx(0.01**2)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_point_that_something_disturbed() -> None:
    def point(batch: int, *times_s: float) -> ProfiledPoint:
        blocks = tuple(StepBlock(1, time_s, 1.0, 0.0) for time_s in times_s)
        return ProfiledPoint(batch, 100, ProfiledSteps(blocks, 50, "measured"))

    assert (
        disturbed(
            [point(2, 0.1, 0.1), point(4, 0.095, 0.095), point(8, 0.2, 0.2), ProfiledPoint(16, 100, None)]
        )
        == []
    )
    assert disturbed([point(2, 0.1, 0.2), point(4, 0.1, 0.1)]) == []  # it is not known well enough
    (remark,) = disturbed([point(2, 0.3, 0.3), point(4, 0.2, 0.2)])
    assert "remove batch2-100W.json" in remark


def test_processor(here: Path, cpu: dict[str, str]) -> None:
    words = ("profile", "--batches", "4,64,8,128", "-o", "c.parquet", "--", "train.py", "{batch}")
    done = smaragdine(*words, env=cpu)
    assert done.returncode == 0, done.stderr
    assert "out of memory" in done.stdout
    assert "nothing larger is tried" in done.stderr
    profile = read_profile(here / "c.parquet", "c")
    assert (profile.batches, profile.power_limits_w, profile.out_of_memory) == ((4, 8), (65.0,), (64,))
    for point in profile.points.values():
        assert point.energy_j / point.time_s == pytest.approx(50, rel=0.1)
        assert point.time_s >= point.batch / 1000
        assert point.repeats == 5
    assert profile.idle_w == profile.wait_w == pytest.approx(50, rel=0.1)
    assert {row["provenance"] for row in rows(here / "c.parquet")} == {"measured", None}
    for batch in (4, 8):
        mine = [row for row in rows(here / "c.parquet") if row["batch"] == batch]
        assert sum(row["updates"] for row in mine) >= 50
        assert sum(row["steps"] for row in mine) >= 20
    # Again with one more: what is known is not measured again, not even where it would fail by now.
    write_script(here / "train.py", f"import sys\nif sys.argv[1] != '6': sys.exit('again')\n{dedent(TRAIN)}")
    before = [row for row in rows(here / "c.parquet") if row["batch"] < 64]
    words = ("profile", "--batches", "4,6,8", "-o", "c.parquet", "--", "train.py", "{batch}")
    done = smaragdine(*words, env=cpu)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(": batch ") == 1
    assert read_profile(here / "c.parquet", "c").batches == (4, 6, 8)
    assert [row for row in rows(here / "c.parquet") if row["batch"] != 6] == before
    other = smaragdine("profile", "--batches", "4", "-o", "c.json", "--", "train.py", "{batch}", "x", env=cpu)
    assert other.returncode == 2
    assert "is of another profile" in other.stderr


def test_what_a_program_started_ends_with_it(here: Path, cpu: dict[str, str]) -> None:
    (here / "train.sh").write_text(f"#!/bin/sh\n{sys.executable} train.py $1 &\necho $! > pid\nwait\n")
    (here / "train.sh").chmod(0o755)
    done = smaragdine("profile", "--batches", "4", "-o", "c.json", "--", "./train.sh", "{batch}", env=cpu)
    assert done.returncode == 0, done.stderr
    assert not alive(int((here / "pid").read_text()))


def test_limits_come_back_however_it_ends(here: Path, gpu: dict[str, str]) -> None:
    """Ended twice in its first point, and then let go on to its end."""
    write_script(
        here / "slow.py",
        """
        import os, pathlib, runpy, time
        pathlib.Path("part").write_text(str(os.getpid()))
        os.rename("part", "pid")
        while not pathlib.Path("go").exists():
            time.sleep(0.02)
        runpy.run_path("train.py")
        """,
    )
    words = ["profile", "--batches", "4", "--power", "200,150", "-o", "a.json", "--", "slow.py", "{batch}"]
    spec, file = Path(gpu["FAKE_NVML"]), here / "pid"
    for number in (signal.SIGINT, signal.SIGKILL):
        profile = start(*words, env=gpu)
        assert wait_for(file.exists)
        assert settings_now(spec) == {(0, LIMIT): 200_000}
        if number == signal.SIGINT:
            os.killpg(profile.pid, number)  # as a terminal does
        else:
            profile.send_signal(number)
        _, _, err = finish(profile)
        assert profile.returncode != 0
        assert ("The same command goes on" in err) == (number == signal.SIGINT)
        assert wait_for(lambda: settings_now(spec) == {(0, LIMIT): DEFAULT_MW})
        assert wait_for(lambda: not alive(int(file.read_text())))
        file.unlink()
    (here / "go").touch()
    done = smaragdine(*words, env=gpu)
    assert done.returncode == 0, done.stderr
    assert "power while waiting is not known: RuntimeError: no CUDA here" in done.stdout
    values = json.loads((here / "a.json").read_text())
    assert {batch: [row["power_limit"] for row in each] for batch, each in values.items()} == {
        "4": [200, 150]
    }
    for row in values["4"]:
        assert row["energy"] / row["time"] == pytest.approx(row["power_limit"], rel=1e-3)
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW}
    made = [value for _, what, value in settings_made(spec) if what == LIMIT]
    assert made == [200_000, DEFAULT_MW] * 2 + [200_000, 150_000, DEFAULT_MW]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["profile"], "no program to profile"),
        (["profile", "--"], "nothing to run"),
        (["profile", "--", "train.py"], "nothing in it says {batch}"),
        (["profile", "--batches", "0", "--", "train.py", "{batch}"], "not a whole number"),
        (["profile", "--power", "-5", "--", "train.py", "{batch}"], "not a power above 0 W"),
        (["profile", "--power", "100", "--", "train.py", "{batch}"], "no GPU whose limit"),
        (["profile", "--device", "gpu:0", "--", "train.py", "{batch}"], "there is no gpu:0"),
        (["profile", "--device", "tpu", "--", "train.py", "{batch}"], "that is no device"),
        (["profile", "--device", "cpu:7", "--", "train.py", "{batch}"], "no power limit"),
        (["profile", "-o", "a.csv", "--", "train.py", "{batch}"], ".parquet or .json"),
        (["profile", "-o", "none/a.json", "--", "train.py", "{batch}"], "does not exist"),
        (["profile", "--", "gone.py", "{batch}"], "gone.py does not exist"),
    ],
)
def test_bad_words(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.setenv("FAKE_NVML", str(here.parent / f"{here.name}.spec"))
    write_spec(Path(os.environ["FAKE_NVML"]), [], init_error=9)
    with in_process(here.parent):
        assert main(words) == (127 if "gone.py" in words else 2)
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert {path.name for path in here.iterdir()} == {"train.py"}


def test_bad_programs(here: Path, cpu: dict[str, str]) -> None:
    """One after the other, as batch sizes of the same program; idle power is known already."""
    (here / "cpu-0.profile").mkdir()
    (here / "cpu-0.profile" / "idle.json").write_text('{"power_w": 50, "period_s": 0.004}')
    write_script(
        here / "bad.py",
        """
        import sys, time
        import smaragdine

        batch = int(sys.argv[1])
        if batch == 2:
            raise ValueError("bad data")
        for n in range(14 if batch == 3 else 0):
            smaragdine.mark("step_end", n)
        if batch == 4:
            time.sleep(600)
        """,
    )
    for batch, patience, said in (
        ("1", "60", "no steps were seen"),
        ("2", "60", "exit code 1: ValueError: bad data"),
        ("3", "60", "is too short"),
        ("4", "1", "none came in 1 s"),
    ):
        words = ["profile", "--batches", batch, "--patience", patience, "--", "bad.py", "{batch}"]
        done = smaragdine(*words, env=cpu)
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert not (here / "cpu-0.parquet").exists()


def test_limits_outside_the_range(here: Path, gpu: dict[str, str]) -> None:
    done = smaragdine("profile", "--power", "50", "--", "train.py", "{batch}", env=gpu)
    assert done.returncode == 2
    assert "outside the device's range" in done.stderr
    assert settings_made(Path(gpu["FAKE_NVML"])) == []


def test_a_counter_has_its_fifty_updates(slow: dict[str, Started]) -> None:
    code, _, err = finish(slow["counter"].process)
    assert code == 0, err
    found = rows(slow["counter"].folder / "nvidia-fake-h200.parquet")
    assert sum(row["time_s"] for row in found) >= 50 * 0.1
    assert sum(row["updates"] for row in found) >= 50
    assert sum(row["energy_j"] for row in found) / sum(row["time_s"] for row in found) == pytest.approx(
        250, rel=0.01
    )
    assert {(row["power_limit_w"], row["gpu"]) for row in found} == {(700.0, "nvidia-fake-h200")}
    assert found[0]["idle_w"] == pytest.approx(250, rel=0.01)


def test_one_of_each_model(slow: dict[str, Started]) -> None:
    """A file for each, with the power of the right GPU, also while it waits."""
    here, env = slow["models"].folder, slow["models"].environment
    code, _, err = finish(slow["models"].process)
    assert code == 0, err
    for n, (name, power_w, limit_w) in enumerate([("h200", 250, 700), ("t4", 60, 70)]):
        found = rows(here / "profiles" / f"nvidia-fake-{name}.parquet")
        assert len(found) == 5
        for row in found:
            assert row["energy_j"] / row["time_s"] == pytest.approx(power_w, rel=1e-3)
            assert row["idle_w"] == pytest.approx(power_w, rel=1e-3)
            assert row["wait_w"] == pytest.approx(power_w, rel=1e-3)
            assert row["power_limit_w"] == limit_w
        assert (here / f"{GpuSpec().at(n).uuid}.spun").exists()
    for words, said in ((["-o", "a.parquet"], "or name a folder"), (["--name", "a"], "--name a is for one")):
        both = smaragdine("profile", *words, "--", "train.py", "{batch}", env=env, cwd=here)
        assert both.returncode == 2
        assert said in both.stderr
