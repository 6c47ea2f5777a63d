"""A sweep against a simulated GPU: the known optimum is found, and limits are always as before."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from cli import alive, environment, finish, info, smaragdine, wait_for, write_script
from daemon_fake import a_machine
from nvml_fake import settings_made, settings_now
from smaragdine.errors import UserError
from smaragdine.files import locked
from smaragdine.jobs.lender import Wanted, _DaemonLender  # pyright: ignore[reportPrivateUsage]
from smaragdine.limits.nvml import LimitValue as Limit
from smaragdine.monitor.client import Client, DaemonError
from smaragdine.sweep.sweep import gone_if_refused
from smaragdine.sweep.table import Repetition, read_results
from sweep_bench import DEFAULT_MW, GPU, WORKING, Bench, make_bench

# Energy is this parabola by the program's own physics: limit × time of its work.
BEST_W, LEAST_J, BEND_J = 240.0, 100.0, 0.006
LIMITS = (150, 210, 270, 330)
NOISE = (0.02, -0.02)  # of the first and the second repetition at each limit: none in the mean


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A whole sweep, made once."""
    made = make_bench(tmp_path_factory.mktemp("full"), WORKING)
    made.program(f"({LEAST_J} + {BEND_J} * (limit_w - {BEST_W}) ** 2) * (1 + {NOISE}[before]) / limit_w")
    words = ["--power", ",".join(map(str, LIMITS)), "--repeat", "2", "--seed", "7", "-o", "sweep"]
    done = made.run(*words, "--", "work.py", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    return made


def test_the_known_optimum_lies_in_the_stated_interval(full: Bench) -> None:
    done = smaragdine("fit", full.sweep, "--quantity", "energy", "--json", cwd=full.folder)
    assert done.returncode == 0, done.stderr
    (fit,) = json.loads(done.stdout)["groups"]
    low, high = fit["interval"]
    assert low <= BEST_W <= high
    assert LIMITS[0] < low < fit["optimum"] < high < LIMITS[-1]
    assert not fit["edge"]
    assert fit["optimum_value"] == pytest.approx(LEAST_J, rel=0.01)


def test_each_row_is_what_the_gpu_used(full: Bench) -> None:
    rows = read_results(full.sweep)
    assert {(row.power_limit_w, row.repetition) for row in rows} == {
        (float(limit), n) for limit in LIMITS for n in (0, 1)
    }
    for row in rows:
        assert row.status == "complete"
        assert (row.device, row.device_name, row.provenance) == ("gpu:0", GPU.name, "measured")
        assert row.power_limit_w is not None
        assert row.time_s is not None
        parabola_j = LEAST_J + BEND_J * (row.power_limit_w - BEST_W) ** 2
        assert row.energy_j == pytest.approx(parabola_j * (1 + NOISE[row.repetition]), rel=1e-3)
        assert row.parameters == {}
        assert info(full.sweep / row.recording)["status"] == "complete"
        log = full.sweep / "logs" / f"{Path(row.recording).name}.log"
        assert log.read_text() == f"limit {row.power_limit_w} --epochs 1\n"


def test_the_order_is_shuffled_anew_in_each_repetition_and_recorded(full: Bench) -> None:
    plan = json.loads((full.sweep / "plan.json").read_text())
    assert plan["seed"] == 7
    rows = read_results(full.sweep)
    assert [row.recording for row in rows] == [f"runs/{task['name']}" for task in plan["tasks"]]
    assert [row.repetition for row in rows] == [0] * 4 + [1] * 4
    begun = [info(full.sweep / row.recording)["begin_ns"] for row in rows]
    assert begun == sorted(begun)
    orders = [[row.power_limit_w for row in rows[n : n + 4]] for n in (0, 4)]
    assert orders[0] != orders[1]
    assert sorted(LIMITS) not in orders


def test_the_limit_is_as_before(full: Bench) -> None:
    assert settings_now(full.spec) == {(0, "l"): DEFAULT_MW}


def test_the_same_command_again_has_nothing_to_do(full: Bench) -> None:
    before = settings_made(full.spec)
    done = full.run("--resume", "sweep")
    assert done.returncode == 0, done.stderr
    assert settings_made(full.spec) == before
    other = full.run("--power", "150", "-o", "sweep", "--", "work.py")
    assert other.returncode == 2
    assert "sweep holds another sweep" in other.stderr


def test_all_figures_from_one_command(full: Bench) -> None:
    words = ["fit", full.sweep, "--figures", "figures", "--format", "svg"]
    done = smaragdine(*words, cwd=full.folder)
    assert done.returncode == 0, done.stderr
    drawn = {path.stem for path in (full.folder / "figures").rglob("*.svg")}
    assert drawn >= {"fit", "power", "mean_power", "cumulative", "sampling"}


def test_a_dry_run_prints_the_plan_and_its_time_and_changes_nothing(full: Bench, tmp_path: Path) -> None:
    words = ["--power", "150,300", "--repeat", "2", "--seed", "1", "--dry-run", "--", "work.py"]
    before = settings_made(full.spec)
    done = full.run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("work.py") == 4
    assert "4 repetitions, seed 1; time: unknown" in done.stdout
    assert not (full.folder / "sweeps").exists()
    # Half of it done: the rest takes as long as that did.
    half = tmp_path / "half"
    shutil.copytree(full.sweep, half)
    for row in read_results(half)[4:]:
        shutil.rmtree(half / row.recording)
    done = full.run("--resume", half, "--dry-run")
    assert done.returncode == 0, done.stderr
    took_s = sum(row.time_s or 0 for row in read_results(full.sweep)[:4])
    assert "4 repetitions, seed 7; time: about" in done.stdout
    assert float(done.stdout.split("about ")[1].split(" s")[0]) == pytest.approx(took_s, rel=0.01)
    assert settings_made(full.spec) == before


def test_ctrl_c_restores_and_says_how_to_go_on(bench: Bench) -> None:
    bench.program("30 if before == 0 else 0.05")
    words = ["--power", "150,250", "--repeat", "1", "--seed", "1", "--", "work.py"]
    process = bench.start(*words)
    assert wait_for(lambda: list(bench.folder.glob("ran-*")) or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert "Go on with: smaragdine sweep --resume sweeps/" in err
    assert bench.restored()
    assert not list(bench.folder.glob("sweeps/*/runs/*"))
    (first,) = bench.folder.glob("ran-*")
    other = {"ran-150": "ran-250", "ran-250": "ran-150"}[first.name]
    (bench.folder / other).write_text("x")
    again = bench.run(*words)
    assert again.returncode == 0, again.stderr
    (sweep,) = (bench.folder / "sweeps").iterdir()
    assert [row.status for row in read_results(sweep)] == ["complete"] * 2
    assert len(list((sweep / "unfinished").iterdir())) == 1
    assert bench.restored()


@pytest.mark.parametrize(
    ("gpu", "words", "said"),
    [
        (GPU, ["--power", "50,150"], "gpu:0 power limit of 50 W: outside the device's range"),
        (GPU, ["--clock", "3201,1000"], "1000 MHz is not one of its clocks. Nearest: 990, 1237, 742 MHz"),
        (GPU, ["--power", "150", "--devices", "gpu:3"], "there is no gpu:3: there is gpu:0"),
        (replace(GPU, set_permission=False), ["--power", "150"], "only root with CAP_SYS_ADMIN"),
        (None, ["--power", "150"], "no GPU whose limits could be set"),
        (None, ["--parameter", "x=1", "--parameter", "x=2"], "--parameter x is there twice"),
        (GPU, ["--parameter", "x=1", "--cool-down", "40", "--devices", "gpu:1"], "there is no gpu:1"),
    ],
)
def test_what_the_device_refuses_is_refused_before_anything_runs(
    tmp_path: Path, gpu: object, words: list[str], said: str
) -> None:
    bench = make_bench(tmp_path, gpu)  # type: ignore[arg-type]
    bench.program()
    done = bench.run(*words, "--", "work.py", "{x}")
    assert done.returncode == 2
    assert said in done.stderr
    # Nothing before it: no folder that is gone again.
    assert done.stderr.startswith("smaragdine: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "sweeps").exists()
    assert gpu is None or bench.restored()


def test_what_is_refused_leaves_the_folders_that_were_there(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, replace(GPU, set_permission=False))
    bench.program()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    for output in ("mine", "mine/new/sweep"):
        assert bench.run("--power", "150", "-o", output, "--", "work.py").returncode == 2
        assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def test_what_is_refused_does_not_touch_the_same_sweep_started_at_the_same_time(tmp_path: Path) -> None:
    def refuse(folder: Path, at_work: bool) -> None:
        with gone_if_refused(folder):
            folder.mkdir()
            (folder / "plan.json").write_text("{}")
            if at_work:
                stack.enter_context(locked(folder))
            raise UserError("refused")

    with contextlib.ExitStack() as stack:
        for name in ("ours", "others"):
            with pytest.raises(UserError, match="refused"):
                refuse(tmp_path / name, at_work=name == "others")
    assert [path.name for path in tmp_path.iterdir()] == ["others"]
    assert (tmp_path / "others" / "plan.json").exists()


def test_the_gpus_cool_down_first(bench: Bench) -> None:
    bench.program()
    hot, cool = replace(GPU, temperature=70), replace(GPU, temperature=40)
    bench.gpu(hot)
    process = bench.start(
        "--power", "150", "--repeat", "1", "--cool-down", "50", "-o", "sweep", "--", "work.py"
    )
    try:
        # The limits were tried and taken back, so the sweep has begun; hot as it is, nothing runs.
        tried = [150_000, DEFAULT_MW]
        assert wait_for(lambda: bench.set_values() == tried or process.poll() is not None)
        assert not list(bench.folder.glob("ran-*"))
        cooled_ns = time.time_ns()
        bench.gpu(cool)
    finally:
        code, _, err = finish(process)
    assert code == 0, err
    (row,) = read_results(bench.sweep)
    assert info(bench.sweep / row.recording)["begin_ns"] > cooled_ns


def test_clocks_warm_up_baseline_and_a_cool_down_that_takes_too_long(bench: Bench) -> None:
    bench.program()
    (bench.folder / "e.toml").write_text("""
        [[experiments]]
        name = "clocks"
        repeat = 1
        clock_limits = [[3201, 990]]
        devices = ["gpu:0"]
        warm_up = 1
        baseline_s = 0.3
        cool_down = {temperature_c = 20, timeout_s = 0.1}
        benchmarks = [{command = ["work.py", "{epochs}"], epochs = 3}]
    """)
    done = bench.run("e.toml", "-o", "sweep")
    assert done.returncode == 0, done.stderr
    assert "still 41 °C after 0.1 s, not 20: goes on anyway" in done.stderr
    (row,) = read_results(bench.sweep)
    assert (row.limit_kind, row.memory_clock_mhz, row.graphics_clock_mhz) == ("clock", 3201, 990)
    assert (bench.folder / "ran-700").read_text() == "xx"
    assert info(bench.sweep / "baseline")["status"] == "complete"
    assert [value for _, what, value in settings_made(bench.spec) if what == "a"][-1] == 0
    assert 3_201_000_990 in [value for _, what, value in settings_made(bench.spec) if what == "a"]
    assert not list((bench.sweep / "unfinished").iterdir())


def test_repeating_ends_when_the_energy_is_known(bench: Bench) -> None:
    bench.program("0.4")
    words = ["--power", "150", "--repeat", "6", "--until", "60%", "-o", "sweep", "--", "work.py"]
    done = bench.run(*words)
    assert done.returncode == 0, done.stderr
    assert [row.repetition for row in read_results(bench.sweep)] == [0, 1, 2]


def test_through_the_daemon(tmp_path: Path) -> None:
    with a_machine(gpus=[GPU]) as machine, machine.daemon() as daemon:
        bench = make_bench(tmp_path, None)
        bench.env |= {**machine.env, "SMARAGDINE_DAEMON": str(daemon.socket)}
        bench.program()
        done = bench.run("--power", "150,250", "--repeat", "1", "-o", "sweep", "--", "work.py")
        assert done.returncode == 0, done.stderr
        assert {row.power_limit_w for row in read_results(bench.sweep)} == {150.0, 250.0}
        assert {path.name for path in tmp_path.glob("ran-*")} == {"ran-150", "ran-250"}
        assert "power limit set to " in daemon.lines()
        assert bench.restored()
        assert not (tmp_path / "limits").exists()


def test_a_daemon_that_does_not_answer_once_takes_no_lease_away() -> None:
    class Flaky:
        """A client whose calls fail as often as is asked for."""

        def __init__(self, client: Client) -> None:
            self._client, self.fails = client, 0
            self.release = client.release

        def set_limit(self, *words: Any) -> Any:
            if self.fails:
                self.fails -= 1
                raise DaemonError("DEADLINE_EXCEEDED", "the daemon does not answer")
            self.given = self._client.set_limit(*words)
            return self.given

    with a_machine(gpus=[GPU]) as machine, machine.daemon() as daemon, daemon.connect() as client:
        said: list[str] = []
        flaky = Flaky(client)
        leases = _DaemonLender(cast("Client", flaky), said.append)
        wanted: Wanted = {("gpu:0", "power"): Limit(300.0)}
        leases.apply(wanted)
        assert leases.held()
        flaky.fails = 1
        assert not leases.held(), "nobody knows"
        leases.apply(wanted)
        assert leases.held()
        assert said == []
        client.release(flaky.given.lease_id)
        assert not leases.held()
        assert len(said) == 1
        leases.apply(wanted)
        assert leases.held()
        client.release(flaky.given.lease_id)
        leases.close()
        assert settings_now(Path(machine.env["FAKE_NVML"])) == {(0, "l"): DEFAULT_MW}


def test_what_fails_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, None)
    failing = "import sys; print('bad', file=sys.stderr); sys.exit(3 if sys.argv[1] == '32' else 0)"
    write_script(tmp_path / "work.py", failing)
    words = ["--parameter", "batch=16,32", "--repeat", "1", "--seed", "1", "-o", "sweep"]
    done = bench.run(*words, "--retry", "1", "--", "work.py", "{batch}")
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("work-work-batch_32-1: exit code 3: bad") == 2
    assert "smaragdine: runs/work-work-batch_32-1 failed. Try again with: " in done.stderr
    status = {row.parameters["batch"]: row.status for row in read_results(bench.sweep)}
    assert status == {16: "complete", 32: "failed"}
    write_script(tmp_path / "work.py", "")
    again = bench.run("--resume", "sweep")
    assert again.returncode == 0, again.stderr
    rows = read_results(bench.sweep)
    assert {row.parameters["batch"]: row.status for row in rows} == {16: "complete", 32: "complete"}
    assert all(isinstance(row, Repetition) and row.limit_kind == "parameter" for row in rows)


def test_one_whose_recorder_died_has_failed_and_runs_again(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, None)
    killing = """
        import os, signal, time
        from pathlib import Path
        for children in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
            for pid in children.read_text().split():
                if b"smaragdine.recording.recorder" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.4)
    """
    write_script(tmp_path / "work.py", killing)
    words = ["--parameter", "x=1", "--repeat", "1", "--retry", "1", "-o", "sweep", "--", "work.py", "{x}"]
    done = bench.run(*words)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("work-work-x_1-1: not measured: the monitor died (signal 9)") == 2
    assert "smaragdine: runs/work-work-x_1-1 failed. Try again with: " in done.stderr
    (row,) = read_results(bench.sweep)
    assert (row.status, row.energy_j) == ("complete", None)
    write_script(tmp_path / "work.py", "")
    again = bench.run("--resume", "sweep")
    assert again.returncode == 0, again.stderr
    (row,) = read_results(bench.sweep)
    assert row.of_use


def test_modules_beside_the_program_are_not_ours_and_mistakes_are_told_by_option(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, None)
    (tmp_path / "numpy.py").write_text("raise SystemExit('not for us')")
    # -P: as its own command starts it.
    ours = [sys.executable, "-P", "-m", "smaragdine", "sweep", "-o", "a sweep", "--repeat", "1"]
    words = [*ours, "--parameter", "x=1", "--", "echo", "{x}"]
    done = subprocess.run(words, env=environment(bench.env), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    assert "best setting: smaragdine fit 'a sweep'" in done.stderr
    (tmp_path / "numpy.py").unlink()
    twice = bench.run("--parameter", "x=1,1", "--", "echo", "{x}")
    assert twice.stderr == "smaragdine: --parameter: 1 is there twice. Use --repeat for repetitions\n"


def test_what_a_program_started_ends_with_it_when_it_takes_too_long(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, None)
    script = tmp_path / "work.sh"
    script.write_text("#!/bin/sh\nsleep 300 &\necho $! > pid\nwait\n")
    script.chmod(0o755)
    words = ["--parameter", "x=1", "--repeat", "1", "--timeout", "1", "-o", "sweep", "--", "./work.sh", "{x}"]
    assert bench.run(*words).returncode == 1
    assert not alive(int((tmp_path / "pid").read_text()))


def test_one_that_takes_too_long_is_ended_and_has_failed_though_it_ends_well(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, None)
    write_script(
        tmp_path / "work.py",
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(30)",
    )
    words = ["--parameter", "x=30", "--repeat", "1", "--timeout", "1", "-o", "sweep", "--", "work.py", "{x}"]
    done = bench.run(*words)
    assert done.returncode == 1, done.stderr
    assert "ended, for it took too long" in done.stderr
    (row,) = read_results(bench.sweep)
    assert row.status == "killed"
