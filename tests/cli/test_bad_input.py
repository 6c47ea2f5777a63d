"""What goes wrong ends in one clear line, exit code 2, and nothing half-written; the program goes first."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smaragdine as api
from cli import alive, environment, finish, info, show_json, smaragdine, start, wait_for, write_script
from powercap_fake import PowercapTree
from smaragdine.cli.main import main
from smaragdine.errors import UserError

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
PR_CAPBSET_DROP = 24


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of two seconds, measured; tests spoil copies of it."""
    folder = tmp_path_factory.mktemp("recorded")
    with PowercapTree(folder / "powercap", packages=1) as tree:
        tree.start({"cpu:0": 20.0, "dram:0": 5.0})
        run = smaragdine(
            "run", "-o", folder / "run", "sleep", "2.3", env={"SMARAGDINE_POWERCAP_ROOT": str(tree.root)}
        )
    assert run.returncode == 0, run.stderr
    return folder / "run"


@pytest.fixture
def spoilt(recorded: Path, here: Path) -> Path:
    return Path(shutil.copytree(recorded, here / "spoilt"))


def refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 2) -> None:
    """One line on stderr that says these words; an exit code; nothing on stdout."""
    assert "Traceback" not in done.stderr
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("smaragdine: ")
    for word in words:
        assert word in lines[0]


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


# Programs that cannot be started


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["missing.py"], "missing.py does not exist", 127),
        (["no-such-command"], "no-such-command", 127),
        (["./no-such-file"], "no such file", 127),
        (["--", "/no/such/program"], "no such file", 127),
        (["folder"], "__main__.py", 126),
        (["--", "./folder"], "it is a folder", 126),
        (["book.ipynb"], "notebook", 2),
        (["notes.txt"], "notes.txt", 126),
        (["./notes.txt"], "not executable", 126),
        (["./bad-format"], "bad-format", 126),
        (["./bad-interpreter"], "bad-interpreter", 126),
        (["-m"], "-m needs a module", 2),
        (
            ["--epochs", "3", "missing.py"],
            "unknown option --epochs: options before the program's name are ours",
            2,
        ),
        (
            ["--trace", "off", "--trace-steps=5", "notes.txt"],
            "--trace-steps says how to trace: --trace is off. Leave one of them out",
            2,
        ),
        (["--"], "nothing to run", 2),
        ([], "nothing to run", 2),
    ],
)
def test_what_cannot_be_started_is_refused_as_a_shell_does_and_leaves_nothing(
    here: Path, words: list[str], said: str, code: int
) -> None:
    (here / "folder").mkdir()
    for name in ("book.ipynb", "notes.txt", "bad-format"):
        (here / name).write_text("x")
    (here / "bad-format").chmod(0o755)
    (here / "bad-interpreter").write_text("#!/no/such/interpreter\n")
    (here / "bad-interpreter").chmod(0o755)
    before = files()
    refused(smaragdine("run", *words), said, code=code)
    assert files() == before
    assert not Path("runs").exists()


@pytest.mark.parametrize("verb", ["run", "sweep", "tune", "profile", "study"])
@pytest.mark.parametrize(
    ("program", "code"), [("/no/such/program", 127), ("gone.py", 127), ("./notes.txt", 126)]
)
def test_every_verb_that_runs_programs_ends_as_a_shell_does(
    here: Path, capsys: pytest.CaptureFixture[str], verb: str, program: str, code: int
) -> None:
    (here / "notes.txt").write_text("x")
    words = {"study": ["custom"], "sweep": ["--power", "100"]}.get(verb, [])
    more = {"profile": ["{batch}"]}.get(verb, [])
    assert main([verb, *words, "--", program, *more]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert files() == ["notes.txt"]


def test_an_output_folder_is_taken_back_when_the_program_cannot_start(here: Path) -> None:
    (here / "bad").write_text("x")
    (here / "bad").chmod(0o755)
    (here / "kept").mkdir()
    refused(smaragdine("run", "-o", "kept/out", "./bad"), code=126)
    assert list((here / "kept").iterdir()) == []


def test_output_where_no_folder_can_be_is_refused(here: Path) -> None:
    (here / "file").write_text("x")
    refused(smaragdine("run", "-o", "file", "true"), "file is a file")
    refused(smaragdine("run", "-o", "file/out", "true"), "file/out")
    refused(smaragdine("run", "-o", "/proc/nowhere", "true"), "/proc/nowhere")
    (here / "runs").write_text("x")
    refused(smaragdine("run", "true"), "runs")
    assert files() == ["file", "runs"]


def test_a_folder_whose_name_is_no_text_is_refused(here: Path) -> None:
    refused(smaragdine("run", "-o", os.fsencode(here) + b"/w\xff", "true"), "not UTF-8")
    assert files() == []


def test_a_working_folder_that_is_gone_is_no_traceback(here: Path) -> None:
    (here / "gone").mkdir()
    done = smaragdine("run", "-o", here / "out", "true", preexec_fn=lambda: enter_and_remove(here / "gone"))
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2)


def enter_and_remove(folder: Path) -> None:
    os.chdir(folder)
    folder.rmdir()


# Programs that go wrong


def test_a_script_that_raises_ends_as_under_plain_python(here: Path) -> None:
    write_script(here / "train.py", "def f():\n    raise ValueError('loss is nan')\nf()\n")
    alone = subprocess.run([sys.executable, "train.py"], env=environment(), capture_output=True, check=False)
    done = smaragdine("run", "train.py", text=False)
    assert done.returncode == alone.returncode == 1
    assert done.stdout == b""
    assert done.stderr.startswith(alone.stderr)
    assert done.stderr.count(b"Traceback") == 1


def test_a_syntax_error_ends_as_under_plain_python(here: Path) -> None:
    (here / "train.py").write_text("def f(:\n")
    alone = subprocess.run([sys.executable, "train.py"], env=environment(), capture_output=True, check=False)
    done = smaragdine("run", "-o", "out", "train.py", text=False)
    assert done.returncode == alone.returncode == 1
    assert done.stderr.startswith(alone.stderr)
    assert show_json("out")["status"] == "failed"


def test_a_missing_module_ends_as_under_plain_python() -> None:
    words = ["-m", "no_such_module_at_all"]
    alone = subprocess.run([sys.executable, *words], env=environment(), capture_output=True, check=False)
    done = smaragdine("run", *words, text=False)
    assert done.returncode == alone.returncode == 1
    assert done.stderr.startswith(alone.stderr)


def test_a_script_that_is_not_utf8_ends_as_under_plain_python(here: Path) -> None:
    (here / "train.py").write_bytes(b"# \xff\xfe\nprint('x')\n")
    alone = subprocess.run([sys.executable, "train.py"], env=environment(), capture_output=True, check=False)
    done = smaragdine("run", "train.py", text=False)
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout)
    assert done.stderr.startswith(alone.stderr)


def test_exit_3_is_exit_3_and_the_recording_says_failed() -> None:
    done = smaragdine("run", "-o", "out", "sh", "-c", "exit 3")
    assert done.returncode == 3
    assert "failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert (info("out")["status"], info("out")["exit_code"]) == ("failed", 3)


def test_a_killed_program_is_said_to_be_killed() -> None:
    done = smaragdine("run", "-o", "out", "sh", "-c", "kill -9 $$")
    assert done.returncode == -signal.SIGKILL
    assert "Traceback" not in done.stderr
    assert show_json("out")["status"] == "killed"


def test_binary_output_is_passed_on_as_it_is(here: Path) -> None:
    write_script(here / "train.py", "import os, sys; sys.stdout.buffer.write(bytes(range(256)) * 1000)")
    done = smaragdine("run", "train.py", text=False)
    assert done.returncode == 0
    assert done.stdout == bytes(range(256)) * 1000


def test_a_daemon_does_not_hold_up_the_end(here: Path) -> None:
    write_script(
        here / "daemonise.py",
        """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            for fd in (0, 1, 2):
                os.close(fd)
            with open("pid", "w") as file:
                file.write(str(os.getpid()))
            os.rename("pid", "daemon")
            time.sleep(30)
            os._exit(0)
        os.wait()
        while not os.path.exists("daemon"):
            time.sleep(0.01)
        """,
    )
    done = smaragdine("run", "-o", "out", "daemonise.py")
    daemon = int(Path("daemon").read_text())
    lives = alive(daemon)
    os.kill(daemon, signal.SIGKILL)
    assert lives
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert show_json("out")["status"] == "complete"


def test_a_program_that_empties_its_environment_and_closes_everything(here: Path) -> None:
    write_script(
        here / "train.py",
        """
        import os, sys
        import smaragdine
        smaragdine.mark("epoch_begin", 0)
        os.environ.clear()
        os.closerange(3, 300)
        file = open("mine", "w")
        smaragdine.mark("epoch_end", 0)
        file.write("mine")
        file.close()
        os.execve("/bin/sh", ["sh", "-c", "exit 6"], {})
        """,
    )
    done = smaragdine("run", "-o", "out", "train.py")
    assert done.returncode == 6
    assert "Traceback" not in done.stderr
    assert Path("mine").read_text() == "mine"
    assert [epoch["index"] for epoch in show_json("out")["epochs"]] == [0]


# Sensors that cannot be read


def without_overriding_permissions() -> None:
    """Root, but bound by permission bits like everybody else."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


@pytest.fixture
def unreadable_powercap(here: Path) -> Iterator[dict[str, Any]]:
    with PowercapTree(here / "powercap", packages=1) as tree:
        for zone in tree.zones.values():
            (zone / "energy_uj").chmod(0o000)
        bound = without_overriding_permissions if os.geteuid() == 0 else None
        # A powercap that must not be read is no reason for perf to be: it is not there.
        roots = {
            "SMARAGDINE_POWERCAP_ROOT": str(tree.root),
            "SMARAGDINE_PERF_ROOT": str(here / "none"),
            "SMARAGDINE_HWMON_ROOT": str(here / "none"),
        }
        yield {"env": roots, "preexec_fn": bound}


def test_doctor_explains_an_unreadable_powercap(unreadable_powercap: dict[str, Any]) -> None:
    done = smaragdine("doctor", "--json", **unreadable_powercap)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    cpu = [c for c in found["channels"] if c["device"] == "cpu:0" and c["quantity"] in ("power", "energy")]
    assert [c["provenance"] for c in cpu] == ["estimated"]
    denied = [a for a in found["absent"] if "permission" in a["reason"].lower() or "root" in a["reason"]]
    assert denied
    assert all(a["remedy"] for a in found["absent"])
    table = smaragdine("doctor", **unreadable_powercap)
    assert table.returncode == 0
    assert "absent" in table.stdout
    assert "Traceback" not in table.stderr


def test_run_with_an_unreadable_powercap_estimates_and_says_so(unreadable_powercap: dict[str, Any]) -> None:
    done = smaragdine("run", "-o", "out", "sh", "-c", "echo out; exit 3", **unreadable_powercap)
    assert (done.returncode, done.stdout) == (3, "out\n")
    assert "estimated" in done.stderr
    assert "Traceback" not in done.stderr
    assert show_json("out")["devices"]["cpu:0"]["provenance"] == "estimated"
    assert info("out")["absent"]


@pytest.mark.parametrize("tree", ["POWERCAP", "PROC", "HWMON"])
def test_a_tree_that_is_not_there_costs_figures_not_the_program(here: Path, tree: str) -> None:
    env = {f"SMARAGDINE_{tree}_ROOT": str(here / "nowhere")}
    done = smaragdine("run", "-o", "out", "sh", "-c", "exit 3", env=env)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert show_json("out")["status"] == "failed"


@pytest.mark.parametrize("words", [["run", "true"], ["doctor"], ["baseline", "--seconds", "1"]])
def test_a_setting_that_is_no_number_is_refused(words: list[str]) -> None:
    refused(smaragdine(*words, env={"SMARAGDINE_CPU_RATED_W": "lots"}), "SMARAGDINE_CPU_RATED_W")
    assert list(Path().iterdir()) == []


def test_a_counter_that_vanishes_during_the_run_is_said(here: Path) -> None:
    with PowercapTree(here / "powercap", packages=1, core=False) as tree:
        # A file that reads as a number until its process ends, and as an error then, like a lost driver.
        holder = subprocess.Popen(["sleep", "30"])
        counter = tree.zones["intel-rapl:0"] / "energy_uj"
        counter.unlink()
        counter.symlink_to(f"/proc/{holder.pid}/oom_score_adj")
        process = start("run", "-o", "out", "sleep", "2", env={"SMARAGDINE_POWERCAP_ROOT": str(tree.root)})
        assert wait_for((here / "out" / "power.arrows").exists)
        holder.kill()
        holder.wait()
        code, _, stderr = finish(process)
    assert code == 0, stderr
    assert "Traceback" not in stderr
    assert "lost: cpu:0" in stderr
    shown = show_json("out")
    assert shown["devices"]["cpu:0"]["missing_s"] > 0.3
    assert shown["devices"]["dram:0"]["missing_s"] == 0
    assert any("cpu:0" in problem for problem in shown["problems"])


# Disks that fill up, folders that vanish


@pytest.fixture
def small_disk(here: Path) -> Iterator[Path]:
    disk = here / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    try:
        made = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command here")
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=False)


FILLS_DISK = """
import os, sys, time
time.sleep(float(sys.argv[1]))
fd = os.open("disk/filler", os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(fd, bytes(512))
except OSError:
    pass
print("full", flush=True)
time.sleep(float(sys.argv[2]))
sys.exit(5)
"""


def complaints(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "No space" in line]


def test_a_disk_that_fills_up_costs_readings_not_the_program(here: Path, small_disk: Path) -> None:
    write_script(Path("train.py"), FILLS_DISK)
    with PowercapTree(here / "powercap", packages=2, uncore=True) as tree:
        tree.start({"cpu:0": 20.0})
        env = {"SMARAGDINE_POWERCAP_ROOT": str(tree.root)}
        done = smaragdine("run", "-o", "disk/out", "train.py", "1.6", "2.2", env=env)
    assert (done.returncode, done.stdout) == (5, "full\n")
    assert "Traceback" not in done.stderr
    (small_disk / "filler").unlink()
    shown = show_json("disk/out")
    assert shown["devices"]["cpu:0"]["mean_w"] == pytest.approx(20.0, rel=0.05)
    assert 0.5 < shown["duration_s"] < 3.5
    assert any("lost" in line for line in complaints(done.stderr)), done.stderr
    assert "running" not in done.stderr


def test_a_disk_that_is_full_for_a_while_loses_nothing(small_disk: Path) -> None:
    write_script(Path("train.py"), FILLS_DISK.replace("sys.exit(5)", 'os.unlink("disk/filler")'))
    done = smaragdine("run", "-o", "disk/out", "train.py", "0.5", "1.5")
    assert (done.returncode, done.stdout) == (0, "full\n")
    shown = show_json("disk/out")
    assert shown["status"] == "complete"
    assert shown["missing_s"] == 0
    assert {mark["name"] for mark in shown["marks"]} >= {"experiment_begin", "experiment_end"}
    assert "lost" not in done.stderr


def test_a_disk_full_from_the_start_costs_the_recording_not_the_program(small_disk: Path) -> None:
    with open(small_disk / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            pass
    done = smaragdine("run", "-o", "disk/out", "sh", "-c", "echo out; exit 5")
    assert "Traceback" not in done.stderr
    if done.returncode == 2:  # nothing could be created: then nothing was run either
        refused(done, "disk/out")
        return
    assert (done.returncode, done.stdout) == (5, "out\n")
    assert complaints(done.stderr), done.stderr


def test_record_block_whose_monitor_is_killed_says_so() -> None:
    write_script(
        Path("train.py"),
        """
        import os, pathlib, signal, time
        import smaragdine
        with smaragdine.record("out"):
            for pid in pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                if b"smaragdine.recording.recorder" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.3)
        """,
    )
    subprocess.run([sys.executable, "train.py"], env=environment(), check=True)
    assert [problem for problem in info("out")["problems"] if "the monitor died (signal 9)" in problem]
    assert "monitor_died" in api.open("out").marks["name"].to_pylist()


def test_record_block_on_a_full_disk_does_not_touch_the_program(small_disk: Path) -> None:
    write_script(
        Path("train.py"),
        """
        import os, sys
        import smaragdine
        with smaragdine.record("disk/out"):
            fd = os.open("disk/filler", os.O_WRONLY | os.O_CREAT)
            try:
                while True:
                    os.write(fd, bytes(512))
            except OSError:
                pass
            smaragdine.mark("epoch_begin", 0)
        print("trained")
        """,
    )
    done = subprocess.run(
        [sys.executable, "train.py"], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


@pytest.mark.parametrize("after_s", [0.2, 1.5])
def test_a_recording_deleted_during_the_run_does_not_touch_the_program(after_s: float) -> None:
    words = f"import shutil, time; time.sleep({after_s}); shutil.rmtree('out'); print('gone', flush=True)"
    write_script(Path("train.py"), f"{words}; time.sleep(1.2); raise SystemExit(5)")
    done = smaragdine("run", "-o", "out", "train.py")
    assert (done.returncode, done.stdout) == (5, "gone\n")
    assert "Traceback" not in done.stderr
    assert "the recording was lost" in done.stderr
    assert "was deleted during the run" in " ".join(done.stderr.split())


# Recordings that are not what they were


def test_a_table_cut_off_at_any_byte_opens_as_a_prefix(recorded: Path, spoilt: Path) -> None:
    whole = [series.value.tolist() for series in api.open(recorded).series("power")]
    names = [series.channel.name for series in api.open(recorded).series("power")]
    data = (recorded / "power.arrows").read_bytes()
    seen = set()
    for length in [*range(0, len(data), 97), *range(max(0, len(data) - 10), len(data) + 1), 1, 2, 3]:
        (spoilt / "power.arrows").write_bytes(data[:length])
        recording = api.open(spoilt)
        for series in recording.series("power"):
            values = series.value.tolist()
            assert values == whole[names.index(series.channel.name)][: len(values)]
        rows = recording.power.num_rows
        assert rows <= sum(map(len, whole))
        seen.add(rows)
    assert seen >= {0, sum(map(len, whole))}
    assert len(seen) > 2, "a crash after the first second leaves that second"


@pytest.mark.parametrize("table", ["power", "activity", "marks"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_show_of_a_cut_off_table_has_no_traceback(spoilt: Path, table: str, share: float) -> None:
    path = spoilt / f"{table}.arrows"
    os.truncate(path, int(path.stat().st_size * share))
    done = smaragdine("show", "spoilt", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["status"] == "complete"


@pytest.mark.parametrize("table", ["power", "activity", "marks"])
def test_a_table_with_any_byte_turned_over_opens_or_is_one_line(
    recorded: Path, spoilt: Path, table: str
) -> None:
    """Every byte of what says the columns and channels, and some of the readings."""
    data = (recorded / f"{table}.arrows").read_bytes()
    refusals = set()
    for at in [*range(min(3000, len(data))), *range(3000, len(data), 61)]:
        (spoilt / f"{table}.arrows").write_bytes(data[:at] + bytes([data[at] ^ 0x5A]) + data[at + 1 :])
        recording = api.open(spoilt)
        assert any(f"{table}.arrows is damaged" in line for line in recording.damage), at
        try:
            assert recording.table(table).num_rows >= 0
        except UserError as error:
            refusals.add(str(error))
    assert all(f"spoilt/{table}.arrows is damaged" in refusal for refusal in refusals)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"x"',
        "\udcff",
        "{}",
        '{"format_version": null}',
        '{"format_version": "new"}',
        '{"format_version": 1e999}',
        '{"format_version": 1}',
        '{"format_version": 1, "clock": 5}',
        '{"format_version": 1, "clock": {"begin": {"wall_ns": "noon", "mono_ns": 1}}}',
    ],
)
def test_a_spoilt_run_json_is_one_line(spoilt: Path, text: str) -> None:
    (spoilt / "run.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(smaragdine("show", "spoilt"), "spoilt")


def test_a_run_json_with_any_value_of_another_kind_is_shown_or_one_line(
    recorded: Path, spoilt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.loads((recorded / "run.json").read_text())
    refusals = 0
    for path in paths_of(whole):
        for other in (None, 5, "x", [], {}, ["x"], {"a": 1}, -1e300):
            changed = json.loads(json.dumps(whole))
            at = changed
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = other
            (spoilt / "run.json").write_text(json.dumps(changed))
            code = main(["show", "spoilt"])
            lines = capsys.readouterr().err.splitlines()
            if code:
                assert code == 2
                assert len(lines) == 1
                assert lines[0].startswith("smaragdine: spoilt")
                refusals += 1
    assert refusals > 100


@pytest.mark.parametrize(
    "host",
    [
        {"cpu": 3},
        {"sockets": 5},
        {"gpus": ["x"]},
        {"gpus": [{"device": "cpu:0", "name": []}]},
        {"hostname": {}},
    ],
)
def test_a_host_of_another_kind_is_one_line_in_every_verb(
    spoilt: Path, capsys: pytest.CaptureFixture[str], host: dict[str, Any]
) -> None:
    """A table for a paper joins the processor's name with others."""
    info = json.loads((spoilt / "run.json").read_text())
    (spoilt / "run.json").write_text(json.dumps({**info, "host": host}))
    for words in (["show"], ["report"], ["export", "--to", "markdown", "-o", "-"]):
        assert main([words[0], "spoilt", *words[1:]]) == 2
        assert capsys.readouterr().err.startswith("smaragdine: spoilt/run.json cannot be read: ")


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all values in a document, but of the first one only in each list."""
    inside = (
        value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    )
    for key, each in inside:
        yield (*path, key)
        yield from paths_of(each, (*path, key))


def test_a_run_json_cut_off_anywhere_is_one_line(recorded: Path, spoilt: Path) -> None:
    data = (recorded / "run.json").read_bytes().rstrip()
    for length in (1, len(data) // 3, len(data) // 2, len(data) - 1):
        (spoilt / "run.json").write_bytes(data[:length])
        refused(smaragdine("show", "spoilt"), "run.json")


def test_a_newer_format_is_refused_with_the_remedy(spoilt: Path) -> None:
    values = info(spoilt)
    (spoilt / "run.json").write_text(json.dumps({**values, "format_version": values["format_version"] + 1}))
    refused(smaragdine("show", "spoilt"), "format", "Update smaragdine")
    refused(smaragdine("show", "spoilt", "--json"), "format")


def test_fields_of_a_later_version_are_no_hindrance(spoilt: Path) -> None:
    values = info(spoilt)
    channels = [{**channel, "colour": "green"} for channel in values["channels"]]
    (spoilt / "run.json").write_text(json.dumps({**values, "channels": channels, "mood": 1}))
    assert show_json("spoilt")["status"] == "complete"


def test_a_stray_file_in_a_recording_is_no_hindrance(spoilt: Path) -> None:
    shutil.copy(spoilt / "power.arrows", spoilt / "power.old.arrows")
    (spoilt / "notes.txt").write_text("x")
    assert show_json("spoilt")["status"] == "complete"


def test_a_recording_without_tables_says_that_nothing_was_measured(spoilt: Path) -> None:
    for path in spoilt.glob("*.arrows"):
        path.unlink()
    done = smaragdine("show", "spoilt")
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing was measured" in done.stdout


def test_show_of_what_is_no_recording(here: Path, recorded: Path) -> None:
    (here / "file").write_text("x")
    (here / "empty").mkdir()
    refused(smaragdine("show", "missing"), "missing does not exist")
    refused(smaragdine("show", "file"), "file")
    refused(smaragdine("show", "empty"), "no recording")
    refused(smaragdine("show", recorded, "--subtract", "missing"), "missing does not exist")
    refused(smaragdine("show"), "RUN")


def test_a_baseline_of_other_devices_is_refused(recorded: Path, spoilt: Path) -> None:
    (spoilt / "power.arrows").unlink()
    done = smaragdine("show", recorded, "--subtract", "spoilt")
    assert (done.returncode, done.stdout) == (2, "")
    assert "baseline" in done.stderr.splitlines()[-1]


# The command line itself


@pytest.mark.parametrize(
    "words",
    [
        ["fly"],
        ["--fly"],
        ["run", "--fly", "true"],
        ["run", "--period-ms", "0", "true"],
        ["run", "--period-ms", "abc", "true"],
        ["run", "--period-ms", "nan", "true"],
        ["run", "--period-ms=-4", "true"],
        ["run", "--period-ms"],
        ["run", "-o"],
        ["run", "-"],
        ["show", "a", "b"],
        ["show", "--fly"],
        ["doctor", "--fly"],
        ["doctor", "x"],
        ["baseline", "--seconds", "0"],
        ["baseline", "--seconds", "inf"],
        ["baseline", "--seconds", "x"],
        ["baseline", "--fly"],
    ],
)
def test_wrong_words_are_refused_in_one_line(words: list[str]) -> None:
    refused(smaragdine(*words))
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("verb", ["run", "show", "doctor", "baseline"])
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    done = smaragdine(verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: smaragdine {verb}" in done.stdout
    example = done.stdout.partition("example:")[2]
    assert f"smaragdine {verb}" in example


@pytest.mark.parametrize(("word", "meant"), [("reprot", "report"), ("diff", "compare")])
def test_a_verb_that_is_none_is_told_which_was_meant(word: str, meant: str) -> None:
    refused(smaragdine(word), f"unknown verb {word}. Did you mean {meant}? There are: run, ")
    refused(smaragdine("xyz"), "unknown verb xyz. There are: run, ")


def test_general_help_names_every_verb() -> None:
    for words in ([], ["--help"], ["help"]):
        done = smaragdine(*words)
        assert (done.returncode, done.stderr) == (0, "")
        for verb in ("run", "show", "doctor", "baseline"):
            assert f"\n  {verb}" in done.stdout
    assert smaragdine("--version").stdout.startswith("smaragdine ")


def test_a_reader_of_stdout_that_went_away_is_no_traceback(recorded: Path) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    done = smaragdine("show", recorded, "--json", stdout=write_fd)
    os.close(write_fd)
    assert done.stderr == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_cannot_show_every_character_is_no_traceback(recorded: Path, encoding: str) -> None:
    for words in (["show", str(recorded)], ["doctor"], ["--help"], ["show", "ü∞"], ["baseline", "--help"]):
        done = smaragdine(*words, env={"PYTHONIOENCODING": encoding}, text=False)
        assert b"Traceback" not in done.stderr, words
        assert done.returncode in (0, 2)


def test_control_c_during_a_baseline_dies_of_it_without_a_traceback() -> None:
    process = start("baseline", "--seconds", "30", "-o", "idle")
    assert wait_for(lambda: Path("idle/run.json").exists())
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)
    code, _, stderr = finish(process)
    assert code == -signal.SIGINT
    assert "Traceback" not in stderr
    assert show_json("idle")["status"] in ("failed", "interrupted")
    assert stderr.splitlines()[-2:] == [
        "interrupted: the recording holds what was measured until then",
        "recording: idle",
    ]
    said = smaragdine("show", "idle").stdout
    assert "the machine, without a program: " in said
    assert "the recording: " in said
    assert "your program" not in said + smaragdine("report", "idle").stdout
    assert "the program: " not in said
