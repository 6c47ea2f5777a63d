"""`smaragdine run` from outside: the program must not notice it, whatever happens to either of them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smaragdine as api
from cli import (
    SMARAGDINE,
    TIMEOUT_S,
    alive,
    children,
    environment,
    finish,
    info,
    recorder_of,
    show_json,
    smaragdine,
    start,
    wait_for,
    write_script,
)
from powercap_fake import PowercapTree
from smaragdine.recording.reader import Recording
from smaragdine.recording.session import Canary

DUMP = """
import json, os, resource, signal, sys
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
main = sys.modules["__main__"]
umask = os.umask(0)
os.umask(umask)
known = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags),
    "main": {k: repr(v).split(" at 0x")[0] for k, v in vars(main).items() if k.startswith("__")},
    "cwd": os.getcwd(), "pgid": os.getpgrp(), "sid": os.getsid(0), "umask": umask, "nice": os.nice(0),
    "affinity": sorted(os.sched_getaffinity(0)), "scheduler": os.sched_getscheduler(0),
    "limits": [resource.getrlimit(n) for n in range(16)],
    "signals": [status[k].strip() for k in ("SigBlk", "SigIgn", "SigCgt")],
    "fds": sorted(fd for fd in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + fd)),
    "environment": {
        k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("SMARAGDINE_")
    },
    "threads": status["Threads"].strip(), "stdin": sys.stdin.buffer.read().hex(),
}
with open(os.environ["DUMP_TO"], "w") as file:
    json.dump(known, file)
"""

WAITS_FOR_GO = """
import os, sys, time
print("begun", flush=True)
open("pid", "w").write(str(os.getpid()))
os.rename("pid", "ready")
while not os.path.exists("go"):
    time.sleep(0.02)
print("done", flush=True)
sys.exit(3)
"""

COUNTS_SIGNALS = """
import os, signal, time
count = 0
def handler(number, frame):
    global count
    count += 1
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, handler)
open("ready", "w").close()
while not count:
    time.sleep(0.01)
time.sleep(0.7)
open("count.new", "w").write(str(count))
os.rename("count.new", "count")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[PowercapTree]:
    with PowercapTree(tmp_path / "powercap", packages=1, psys=True, wrap_uj=60_000_000) as made:
        yield made


def sensors(tree: PowercapTree) -> dict[str, str]:
    return {"SMARAGDINE_POWERCAP_ROOT": str(tree.root), "SMARAGDINE_PERF_ROOT": str(tree.root / "none")}


def runs() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir()) if Path("runs").is_dir() else []


def plain(*words: str, **more: Any) -> subprocess.CompletedProcess[Any]:
    env = environment(more.pop("env", None))
    return subprocess.run(words, env=env, check=False, timeout=TIMEOUT_S, **more)


# The program as it is without us


def dumps(
    plain_words: list[str], run_words: list[str], **more: Any
) -> tuple[dict[str, Any], dict[str, Any], subprocess.CompletedProcess[Any]]:
    extra = {"DUMP_TO": "dump.json", "SOME": "välue", "EMPTY": "", **more.pop("env", {})}
    alone = plain(*plain_words, env=extra, capture_output=True, **more)
    assert alone.returncode == 0, alone.stderr
    without = json.loads(Path("dump.json").read_text())
    Path("dump.json").unlink()
    done = smaragdine("run", *run_words, env=extra, text=False, **more)
    assert done.returncode == 0, done.stderr
    return without, json.loads(Path("dump.json").read_text()), done


def test_script_sees_what_it_sees_under_plain_python(here: Path) -> None:
    (here / "sub").mkdir()
    write_script(here / "sub" / "train.py", DUMP)
    words = ["sub/train.py", "-o", "x", "--live", "", "two words", "--", "-m"]
    without, within, done = dumps([sys.executable, *words], words, input=bytes(range(256)))
    assert within == without
    assert done.stdout == b""
    assert within["argv"] == words
    assert not Path("x").exists()


def test_module_sees_what_it_sees_under_plain_python(here: Path) -> None:
    (here / "pkg").mkdir()
    (here / "pkg" / "__init__.py").touch()
    write_script(here / "pkg" / "train.py", DUMP)
    words = ["-m", "pkg.train", "--epochs", "3"]
    without, within, _ = dumps([sys.executable, *words], words, input=b"x")
    assert within == without
    assert runs()[0].endswith("-train")


def test_executable_after_two_dashes_sees_its_own_arguments(here: Path) -> None:
    tool = write_script(here / "tool", f"#!{sys.executable}\n{DUMP}")
    tool.chmod(0o755)
    without, within, _ = dumps(["./tool", "-x", "--live"], ["--", "./tool", "-x", "--live"], input=b"x")
    assert within == without


def test_users_pythonpath_still_works(here: Path) -> None:
    (here / "lib").mkdir()
    (here / "lib" / "helper.py").write_text("")
    write_script(here / "train.py", "import helper\n" + DUMP)
    env = {"PYTHONPATH": str(here / "lib")}
    without, within, _ = dumps([sys.executable, "train.py"], ["train.py"], env=env, input=b"")
    assert within["path"] == without["path"]


def test_arguments_that_are_no_text_reach_the_program(here: Path) -> None:
    write_script(here / "train.py", "import os, sys; os.write(1, os.fsencode(sys.argv[1]))")
    command = [*map(os.fsencode, SMARAGDINE), b"run", b"train.py", b"caf\xe9"]
    done = subprocess.run(command, capture_output=True, env=environment(), timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout) == (0, b"caf\xe9")
    assert b"Traceback" not in done.stderr


def test_bytes_of_all_streams_pass_unchanged(here: Path) -> None:
    write_script(
        here / "echo.py",
        """
        import sys
        data = sys.stdin.buffer.read()
        sys.stdout.buffer.write(data)
        sys.stderr.buffer.write(b"<" + data[::-1] + b">")
        sys.stderr.buffer.flush()
        """,
    )
    data = bytes(range(256)) * 400
    done = smaragdine("run", "echo.py", input=data, text=False)
    assert done.returncode == 0
    assert done.stdout == data
    assert done.stderr.startswith(b"<" + data[::-1] + b">")


def test_our_words_go_to_stderr_alone() -> None:
    done = smaragdine("run", "sh", "-c", "echo out; echo err >&2")
    assert done.stdout == "out\n"
    assert done.stderr.startswith("err\n")
    assert f"recording: runs/{runs()[0]}" in done.stderr
    assert "energy" in done.stderr


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_exit_code_is_the_programs(code: int) -> None:
    done = smaragdine("run", "sh", "-c", f"exit {code}")
    assert done.returncode == code
    recorded = info(Path("runs") / runs()[0])
    assert (recorded["exit_code"], recorded["signal"]) == (code, None)
    assert recorded["status"] == ("complete" if code == 0 else "failed")


def test_extra_file_descriptors_are_inherited(here: Path) -> None:
    read_fd, write_fd = os.pipe()
    write_script(here / "train.py", f"import os; os.write({write_fd}, b'through')")
    done = smaragdine("run", "train.py", pass_fds=[write_fd])
    os.close(write_fd)
    assert done.returncode == 0, done.stderr
    assert os.read(read_fd, 100) == b"through"
    os.close(read_fd)


@pytest.mark.parametrize("closed", [0, 1])
def test_a_closed_standard_stream_stays_closed(closed: int) -> None:
    look = 'import os; fds = sorted(os.listdir("/proc/self/fd")); open("fds", "w").write(" ".join(fds))'
    words = ["-c", look]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    plain(sys.executable, *words, preexec_fn=lambda: os.close(closed), **streams)
    without = Path("fds").read_text()
    done = smaragdine("run", "--", sys.executable, *words, preexec_fn=lambda: os.close(closed))
    assert done.returncode == 0
    assert Path("fds").read_text() == without


@pytest.mark.parametrize("options", [[], ["--live"]])
def test_nothing_is_put_on_stdout_when_stderr_is_closed(options: list[str]) -> None:
    command = [*SMARAGDINE, "run", *options, "sh", "-c", "echo out; exit 5"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command],
        stdout=subprocess.PIPE,
        env=environment(),
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (5, b"out\n")


def test_exit_code_survives_a_reader_of_stderr_that_went_away() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    done = smaragdine("run", "sh", "-c", "exit 5", stderr=write_fd)
    os.close(write_fd)
    assert done.returncode == 5


def test_exit_code_survives_an_ignored_sigchld() -> None:
    done = smaragdine("run", "sh", "-c", "exit 7", preexec_fn=lambda: ignore(signal.SIGCHLD))
    assert done.returncode == 7


def test_files_beside_the_script_do_not_shadow_our_imports(here: Path) -> None:
    for name in ("numpy", "pyarrow", "rich", "smaragdine", "resource"):
        (here / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    write_script(here / "train.py", "print('trained')")
    command = Path(sys.executable).with_name("smaragdine")
    if not command.exists():
        pytest.skip("no smaragdine command beside the interpreter")
    done = plain(str(command), "run", "train.py", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "shadowed" not in done.stderr
    assert show_json_elsewhere(here / "runs" / runs()[0])["devices"]


def show_json_elsewhere(run: Path) -> dict[str, Any]:
    done = smaragdine("show", run, "--json", cwd=Path("/"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ignore(number: int) -> None:
    signal.signal(number, signal.SIG_IGN)


# Where the recording goes


def test_default_folder_is_date_and_script_and_a_second_run_gets_a_number(here: Path) -> None:
    write_script(here / "my train.py", "")
    for _ in range(2):
        assert smaragdine("run", "my train.py").returncode == 0
    first, second = runs()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-my-train", first)
    assert second == f"{first}-2"
    assert info(Path("runs") / first)["run_id"] != info(Path("runs") / second)["run_id"]


@pytest.mark.parametrize("holds", ["run.json", "thesis.txt"])
def test_a_folder_with_files_is_refused_untouched(here: Path, holds: str) -> None:
    taken = here / "taken"
    taken.mkdir()
    (taken / holds).write_text("precious")
    done = smaragdine("run", "-o", "taken", "sh", "-c", "touch program-ran")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "taken" in done.stderr
    assert [path.name for path in taken.iterdir()] == [holds]
    assert (taken / holds).read_text() == "precious"
    assert not Path("program-ran").exists()


def test_an_empty_folder_may_be_named_by_output() -> None:
    Path("fresh").mkdir()
    assert smaragdine("run", "--output=fresh", "true").returncode == 0
    assert show_json("fresh")["status"] == "complete"
    assert runs() == []


def test_two_runs_at_once_get_two_recordings() -> None:
    both = [start("run", "sleep", "0.3") for _ in range(2)]
    for process in both:
        assert finish(process)[0] == 0
    assert len(runs()) == 2
    for name in runs():
        assert show_json(Path("runs") / name)["status"] == "complete"


def test_no_variable_with_a_secret_is_stored() -> None:
    env = {"AWS_SECRET_ACCESS_KEY": "hunter2", "OMP_NUM_THREADS": "1"}
    smaragdine("run", "-o", "out", "true", "--api-key", "hunter3", "--hf-token=hunter4", env=env)
    stored = "".join(path.read_text(errors="replace") for path in Path("out").iterdir() if path.is_file())
    assert info("out")["environment"] == {"OMP_NUM_THREADS": "1"}
    for secret in ("hunter2", "hunter3", "hunter4"):
        assert secret not in stored


# Signals


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV", "SIGPIPE", "SIGINT"])
def test_run_dies_of_the_signal_that_killed_the_program(name: str) -> None:
    number = getattr(signal, name)
    done = smaragdine("run", "-o", "out", "sh", "-c", f"kill -{number} $$")
    assert done.returncode == -number
    assert "killed" in done.stderr
    assert (info("out")["status"], info("out")["signal"]) == ("killed", number)
    assert show_json("out")["status"] == "killed"


def counted(send: Callable[[subprocess.Popen[str]], None], **more: Any) -> int:
    write_script(Path("count.py"), COUNTS_SIGNALS)
    process = start("run", "-o", "out", "count.py", **more)
    assert wait_for(Path("ready").exists)
    time.sleep(0.1)
    send(process)
    code, _, stderr = finish(process)
    assert code == 0, stderr
    return int(Path("count").read_text())


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_signal_to_run_alone_reaches_the_program_once(name: str) -> None:
    assert counted(lambda process: process.send_signal(getattr(signal, name))) == 1


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_signal_to_the_whole_group_reaches_the_program_once(name: str) -> None:
    assert counted(lambda process: os.killpg(process.pid, getattr(signal, name))) == 1
    assert info("out")["problems"] == []


def canary_of(pid: int) -> int | None:
    """A fork of the supervisor, so with its command."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    for child in children(pid):
        with contextlib.suppress(OSError):  # it has just ended
            if Path(f"/proc/{child}/cmdline").read_bytes() == command:
                return child
    return None


def test_a_canary_that_is_killed_is_replaced_and_none_is_no_load() -> None:
    def kill_one_then_signal(process: subprocess.Popen[str]) -> None:
        first = canary_of(process.pid)
        assert first
        os.kill(first, signal.SIGKILL)
        assert wait_for(lambda: canary_of(process.pid) not in (None, first))
        os.killpg(process.pid, signal.SIGTERM)

    assert counted(kill_one_then_signal) == 1

    def kill_all(process: subprocess.Popen[str]) -> None:
        while canary := wait_for(lambda: canary_of(process.pid), 1):
            os.kill(canary, signal.SIGKILL)
            assert wait_for(lambda canary=canary: not alive(canary))
        # It sleeps: a descriptor that has come to its end would wake it for ever.
        before_s = cpu_s(process.pid)
        time.sleep(1)
        assert cpu_s(process.pid) - before_s < 0.2
        process.send_signal(signal.SIGTERM)

    shutil.rmtree("out")
    Path("ready").unlink()
    assert counted(kill_all) == 1


def test_a_canary_hears_what_comes_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, block = os.getpid(), signal.pthread_sigmask

    def held_up(how: int, numbers: Any) -> Any:
        if os.getpid() != ours:
            time.sleep(0.3)
        return block(how, numbers)

    monkeypatch.setattr(signal, "pthread_sigmask", held_up)
    with Canary([signal.SIGUSR1]) as canary:
        os.kill(canary._pid, signal.SIGUSR1)
        assert wait_for(canary.take) == bytes([signal.SIGUSR1])


def cpu_s(pid: int) -> float:
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def test_group_signal_reaches_the_program_once_though_the_recorder_was_killed() -> None:
    def kill_recorder_then_signal(process: subprocess.Popen[str]) -> None:
        recorder = recorder_of(process.pid)
        assert recorder
        os.kill(recorder, signal.SIGKILL)
        assert wait_for(lambda: not alive(recorder))
        os.killpg(process.pid, signal.SIGTERM)

    assert counted(kill_recorder_then_signal) == 1


def expects(pid: int | None, number: int) -> bool:
    """Whether a signal would not just end a process: it is caught, ignored or held back."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    sets = [status.partition(f"{name}:")[2].split()[0] for name in ("SigCgt", "SigIgn", "SigBlk")]
    return any(int(each, 16) & 1 << number - 1 for each in sets)


EARLY = """
import os, signal, subprocess, sys, time
from smaragdine.recording.session import GROUP_SIGNALS, Canary, Signals

when = sys.argv[1]
with Canary(GROUP_SIGNALS) as canary:
    signals = Signals(canary)
    if when == "before":
        os.kill(canary._pid, signal.SIGSTOP)  # it is slow to say what it got
        os.killpg(0, signal.SIGTERM)
    with signals.starting() as in_child:
        if when == "while":
            os.killpg(0, signal.SIGTERM)
        program = subprocess.Popen(["sleep", "600"], preexec_fn=in_child)
    os.kill(canary._pid, signal.SIGCONT)
    while program.poll() is None:
        signals.take()
        signals.pass_on(program.pid)
        time.sleep(0.01)
    print(program.returncode)
"""


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_signal_to_the_group_just_before_the_program_is_there_reaches_it(when: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EARLY, when],
        env=environment({}),
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{-signal.SIGTERM}\n", "")


@pytest.mark.parametrize("when", ["run waits", "the recorder listens"])
def test_termination_while_the_sensors_are_opened_is_not_lost(when: str) -> None:
    process = start("run", "-o", "out", "sleep", "600")
    listener = (lambda: process.pid) if when == "run waits" else (lambda: recorder_of(process.pid))
    assert wait_for(lambda: expects(listener(), signal.SIGTERM))
    os.killpg(process.pid, signal.SIGTERM)
    code, _, stderr = finish(process)
    assert code == -signal.SIGTERM, stderr


def test_sigint_ignored_by_the_caller_stays_ignored() -> None:
    write_script(
        Path("train.py"),
        """
        import os, signal, time
        open("disposition", "w").write(str(signal.getsignal(signal.SIGINT)))
        open("ready", "w").close()
        time.sleep(0.8)
        """,
    )
    process = start("run", "train.py", preexec_fn=lambda: ignore(signal.SIGINT))
    assert wait_for(Path("ready").exists)
    os.killpg(process.pid, signal.SIGINT)
    process.send_signal(signal.SIGINT)
    code, _, stderr = finish(process)
    assert code == 0, stderr
    assert Path("disposition").read_text() == str(signal.SIG_IGN)


def test_control_c_on_a_terminal_reaches_the_program_once() -> None:
    write_script(Path("count.py"), COUNTS_SIGNALS)
    with Terminal(["run", "count.py"]) as terminal:
        assert wait_for(Path("ready").exists)
        time.sleep(0.1)
        terminal.type(b"\x03")
        assert terminal.end() == 0
    assert Path("count").read_text() == "1"


def test_control_c_ends_an_ordinary_program_and_leaves_a_recording() -> None:
    write_script(Path("train.py"), 'import time; open("ready", "w").close(); time.sleep(600)')
    with Terminal(["run", "-o", "out", "train.py"]) as terminal:
        assert wait_for(Path("ready").exists)
        time.sleep(0.3)
        terminal.type(b"\x03")
        assert terminal.end() == -signal.SIGINT
    text = terminal.text()
    assert text.count("KeyboardInterrupt") == 1
    assert text.index("KeyboardInterrupt") < text.index("recording: out")
    assert show_json("out")["status"] == "killed"


# Violent ends


def begun(*options: str, env: dict[str, str] | None = None) -> tuple[subprocess.Popen[str], int]:
    """A run whose program waits for the file `go`, and the program's process number."""
    write_script(Path("wait.py"), WAITS_FOR_GO)
    process = start("run", "-o", "out", *options, "wait.py", env=env)
    assert wait_for(Path("ready").exists)
    return process, int(Path("ready").read_text())


def seconds_written(run: str) -> float:
    """How much of a run that goes on is on disk."""
    series = [each.t_ns for each in Recording(Path(run), info(run)).series("power") if each.t_ns.size]
    return max((int(t_ns[-1] - t_ns[0]) / 1e9 for t_ns in series), default=0.0)


def test_kill_of_run_kills_the_program_and_leaves_a_readable_recording(tree: PowercapTree) -> None:
    tree.start({"cpu:0": 20.0, "dram:0": 5.0})
    process, program = begun(env=sensors(tree))
    recorder = recorder_of(process.pid)
    assert recorder
    assert wait_for(lambda: seconds_written("out") > 1)
    process.kill()
    process.communicate()
    assert wait_for(lambda: not alive(program))
    assert wait_for(lambda: not alive(recorder))
    shown = show_json("out")
    assert shown["status"] == "interrupted"
    at_once = 2 * tree.jump_j("cpu:0") / 20.0 / shown["duration_s"]
    assert shown["devices"]["cpu:0"]["mean_w"] == pytest.approx(20.0, rel=0.05 + at_once)
    assert shown["devices"]["cpu:0"]["energy_j"] == pytest.approx(
        20.0 * shown["duration_s"], rel=0.08 + at_once
    )
    assert shown["missing_s"] == 0
    assert shown["duration_s"] > 1


def test_kill_of_the_recorder_costs_seconds_and_nothing_else(tree: PowercapTree) -> None:
    tree.start({"cpu:0": 20.0, "dram:0": 5.0})
    process, program = begun(env=sensors(tree))
    time.sleep(1.3)
    recorder = recorder_of(process.pid)
    assert recorder
    os.kill(recorder, signal.SIGKILL)
    assert wait_for(lambda: not alive(recorder))  # until then it may be found once more
    assert wait_for(lambda: recorder_of(process.pid)) not in (None, recorder)
    time.sleep(2.5)
    assert alive(program)
    Path("go").touch()
    code, out, err = finish(process)
    assert (code, out) == (3, "begun\ndone\n")
    assert len([line for line in err.splitlines() if "monitor died (signal 9)" in line]) == 1
    assert "missing" in err
    shown = show_json("out")
    assert shown["status"] == "failed"
    assert 0.1 < shown["missing_s"] < shown["duration_s"] - 1
    known_s = shown["duration_s"] - shown["missing_s"]
    assert shown["devices"]["cpu:0"]["energy_j"] == pytest.approx(20.0 * known_s, rel=0.05)
    assert shown["devices"]["cpu:0"]["mean_w"] == pytest.approx(20.0, rel=0.03)
    (mean_w,) = re.findall(r"^sum .*?([\d.]+) W", err, re.MULTILINE)
    assert float(mean_w) == pytest.approx(25.0, rel=0.05)


def test_recorder_killed_again_and_again_is_given_up_and_said() -> None:
    process, program = begun()
    killed = 0
    while killed < 10 and (recorder := wait_for(lambda: recorder_of(process.pid), 3)):
        os.kill(recorder, signal.SIGKILL)
        killed += 1
        assert wait_for(lambda pid=recorder: not alive(pid))
    assert 1 < killed < 10
    assert alive(program)
    Path("go").touch()
    code, out, err = finish(process)
    assert (code, out) == (3, "begun\ndone\n")
    assert err.count("monitor died") == killed
    shown = show_json("out")
    assert len([line for line in shown["problems"] if "monitor died" in line]) == killed
    assert shown["missing_s"] > shown["duration_s"] / 2


def test_kill_of_the_program_ends_the_recorder_too() -> None:
    process, program = begun()
    recorder = recorder_of(process.pid)
    assert recorder
    os.kill(program, signal.SIGKILL)
    assert wait_for(lambda: not alive(recorder))
    code, _, _ = finish(process)
    assert code == -signal.SIGKILL
    shown = show_json("out")
    assert shown["status"] == "killed"
    assert shown["devices"]


def test_kill_of_run_and_recorder_at_once_leaves_a_readable_recording() -> None:
    process, program = begun()
    time.sleep(1.3)
    recorder = recorder_of(process.pid)
    assert recorder
    os.kill(recorder, signal.SIGKILL)
    process.kill()
    process.communicate()
    assert wait_for(lambda: not alive(program))
    assert wait_for(lambda: not alive(recorder))
    assert show_json("out")["status"] == "interrupted"


def test_a_daemon_is_left_running_and_said() -> None:
    write_script(
        Path("daemonise.py"),
        """
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            open("pid", "w").write(str(os.getpid()))
            os.rename("pid", "daemon")
            time.sleep(3600)
            os._exit(0)
        os.wait()
        while not os.path.exists("daemon"):
            time.sleep(0.01)
        time.sleep(0.3)
        print("main done")
        """,
    )
    done = smaragdine("run", "-o", "out", "daemonise.py")
    daemon = int(Path("daemon").read_text())
    lives = alive(daemon)
    os.kill(daemon, signal.SIGKILL)
    assert lives
    assert (done.returncode, done.stdout) == (0, "main done\n")
    assert f"outlived it: {daemon}" in done.stderr
    assert show_json("out")["status"] == "complete"


def test_what_multiprocessing_starts_for_itself_is_not_said_to_outlive_the_program() -> None:
    """A resource tracker and a fork server leave once the program is gone, and not before."""
    write_script(
        Path("program.py"),
        """
        import multiprocessing, os, sys, time
        from multiprocessing import resource_tracker

        def work():
            if sys.argv[1] == "stay":
                open("part", "w").write(str(os.getpid()))
                os.rename("part", "worker")
                time.sleep(3600)

        if __name__ == "__main__":
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)  # who outlives this program holds nothing of its caller's
            resource_tracker.ensure_running()
            worker = multiprocessing.get_context("forkserver").Process(target=work)
            worker.start()
            if sys.argv[1] == "stay":
                while not os.path.exists("worker"):
                    time.sleep(0.01)
                time.sleep(0.3)
                os._exit(0)
            worker.join()
            time.sleep(0.3)
        """,
    )
    done = smaragdine("run", "-o", "out", "program.py", "leave")
    assert done.returncode == 0, done.stderr
    assert "outlived" not in done.stderr
    # One of its workers is the program's, under the same command line.
    done = smaragdine("run", "-o", "stayed", "program.py", "stay")
    worker = int(Path("worker").read_text())
    os.kill(worker, signal.SIGKILL)
    assert f"1 process of the program outlived it: {worker}\n" in done.stderr


@pytest.mark.parametrize("times", range(3))
def test_a_program_over_before_it_is_watched_has_a_recording(times: int, tree: PowercapTree) -> None:
    tree.start({"cpu:0": 20.0})
    done = smaragdine("run", "-o", "out", "true", env=sensors(tree))
    assert (done.returncode, done.stdout) == (0, "")
    shown = show_json("out")
    assert shown["status"] == "complete"
    assert shown["problems"] == []
    assert shown["duration_s"] > 0
    ends = info("out")["begin_ns"], info("out")["end_ns"]
    at_once_j = 2 * tree.jump_j("cpu:0") + 20.0 * 0.02
    assert shown["devices"]["cpu:0"]["energy_j"] == pytest.approx(tree.shown_j("cpu:0", *ends), abs=at_once_j)
    assert [mark["name"] for mark in shown["marks"]] == ["experiment_begin", "experiment_end"]


# Numbers


def test_energy_is_what_the_counters_say_through_wraps_and_load_steps(tree: PowercapTree) -> None:
    watched = ("cpu:0", "dram:0", "psys")
    log: list[tuple[float, ...]] = []

    def steps(t_s: float) -> float:
        log.append((time.time_ns(), *map(tree.exact_joules, watched)))
        return 90.0 if t_s % 0.5 < 0.25 else 30.0

    tree.start({"cpu:0": steps, "cpu:0/core": 25.0, "dram:0": 12.0, "psys": 150.0})
    done = smaragdine("run", "-o", "out", "sleep", "4", env=sensors(tree))
    tree.stop()
    assert done.returncode == 0, done.stderr
    shown, ends = show_json("out"), info("out")
    t_ns, *counted = (np.array(column, dtype=float) for column in zip(*log, strict=True))
    limits = [ends["begin_ns"], ends["end_ns"]]
    exact_j = {d: np.diff(np.interp(limits, t_ns, j))[0] for d, j in zip(watched, counted, strict=True)}
    devices = shown["devices"]
    assert exact_j["cpu:0"] > 3 * tree.wrap_uj / 1e6
    for device in watched:
        assert devices[device]["energy_j"] == pytest.approx(exact_j[device], rel=0.02)
    # What the tree came by while it was held up, it shows at once: in 100 ms so much more.
    held_up_s = np.diff(t_ns).max() / 1e9
    assert 0.9 * 90.0 < devices["cpu:0"]["peak_w"] < 1.1 * 90.0 * (1 + held_up_s / 0.1)
    assert {device["provenance"] for device in devices.values()} == {"measured"}
    assert shown["total_j"] == pytest.approx(devices["cpu:0"]["energy_j"] + devices["dram:0"]["energy_j"])
    assert shown["missing_s"] == 0
    assert "not in the sum" in next(line for line in done.stderr.splitlines() if line.startswith("psys"))
    assert "core" not in done.stderr


def test_epochs_of_marks_have_their_indices_and_energies(tree: PowercapTree) -> None:
    write_script(
        Path("train.py"),
        """
        import subprocess, sys, time
        import smaragdine
        for epoch in range(3):
            smaragdine.mark("epoch_begin", epoch)
            time.sleep(0.2 * (epoch + 1))
            smaragdine.mark("epoch_end", epoch)
        child = "import smaragdine; smaragdine.mark('evaluated', 41)"
        subprocess.run([sys.executable, "-c", child], check=True)
        """,
    )
    tree.start({"cpu:0": 50.0})
    done = smaragdine("run", "-o", "out", "train.py", env=sensors(tree))
    assert done.returncode == 0, done.stderr
    shown = show_json("out")
    assert [epoch["index"] for epoch in shown["epochs"]] == [0, 1, 2]
    for epoch in shown["epochs"]:
        assert epoch["duration_s"] == pytest.approx(0.2 * (epoch["index"] + 1), abs=0.1)
        assert epoch["devices"]["cpu:0"]["energy_j"] == pytest.approx(50 * epoch["duration_s"], rel=0.1)
    (child,) = [mark for mark in shown["marks"] if mark["name"] == "evaluated"]
    assert child["index"] == 41
    assert [mark["t_ns"] for mark in shown["marks"]] == sorted(mark["t_ns"] for mark in shown["marks"])
    names = [mark["name"] for mark in shown["marks"]]
    assert names.count("experiment_begin") == names.count("experiment_end") == 1
    assert "mean of 3" in done.stderr


def test_marks_do_nothing_where_nobody_records() -> None:
    done = plain(sys.executable, "-c", "import smaragdine; smaragdine.mark('epoch_begin', 0)")
    assert done.returncode == 0
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("mark", ["'epoch_begin', 2**70", "'a\\ud800b', 1", "'n' * 100_000, -1"])
def test_a_strange_mark_costs_the_program_nothing(mark: str) -> None:
    write_script(Path("train.py"), f"import smaragdine, sys\nsmaragdine.mark({mark})\nsys.exit(4)")
    done = smaragdine("run", "-o", "out", "train.py")
    assert "Traceback" not in done.stderr
    assert done.returncode == 4
    assert show_json("out")["status"] == "failed"


USES_CPU = """
import json, os, resource, subprocess, sys, threading, time
def burn(cpu_s):
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        sum(range(2000))
burn(0.5)
for _ in range(4):
    thread = threading.Thread(target=burn, args=(0.1,))
    thread.start()
    thread.join()
child = "import time\\nwhile time.process_time() < 0.3: pass"
for _ in range(3):
    subprocess.run([sys.executable, "-c", child], check=True)
grandchild = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
subprocess.run([sys.executable, "-c", grandchild, child], check=True)
usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
json.dump(sum(u.ru_utime + u.ru_stime for u in usage), open("cpu_s", "w"))
"""


@contextlib.contextmanager
def busy_neighbour() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def cpu_seconds(recording: Path, quantity: str) -> float:
    table = api.open(recording).table("activity", "numpy")
    values = table["value"][table["quantity"] == quantity]
    return float(values.max()) if values.size else 0.0


def test_program_neighbour_and_monitor_each_have_their_own_share() -> None:
    write_script(Path("train.py"), USES_CPU)
    with busy_neighbour() as neighbour:
        begin_s = time.clock_gettime((~neighbour.pid << 3) | 2)
        done = smaragdine("run", "-o", "out", "train.py")
        neighbour_s = time.clock_gettime((~neighbour.pid << 3) | 2) - begin_s
    assert done.returncode == 0, done.stderr
    true_s = json.loads(Path("cpu_s").read_text())
    program_s = cpu_seconds(Path("out"), "program")
    assert program_s == pytest.approx(true_s, rel=0.1)
    shown = show_json("out")
    share = shown["shares"]["cpu:0"]
    assert share["program"] + share["other"] + share["monitor"] == pytest.approx(1.0)
    # Whoever else works on this machine is "other" too: its busy time is between what we know and all.
    busy_s = true_s / share["program"]
    assert busy_s < 1.1 * (os.cpu_count() or 1) * shown["duration_s"]
    assert busy_s * share["other"] > 0.6 * neighbour_s
    assert share["monitor"] < 0.1
    assert info("out")["program_cpu_s"] == pytest.approx(true_s, rel=0.1)


def test_a_program_of_many_short_children_has_their_cpu_time() -> None:
    write_script(
        Path("train.py"),
        """
        import json, resource, subprocess, sys
        for _ in range(40):
            subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        json.dump(sum(u.ru_utime + u.ru_stime for u in usage), open("cpu_s", "w"))
        """,
    )
    done = smaragdine("run", "-o", "out", "train.py")
    assert done.returncode == 0, done.stderr
    true_s = json.loads(Path("cpu_s").read_text())
    assert cpu_seconds(Path("out"), "program") == pytest.approx(true_s, rel=0.25)


@pytest.mark.parametrize("cpu_s", [0.0, 0.3])
def test_a_busy_program_of_a_fraction_of_a_second_is_not_said_to_be_idle(cpu_s: float) -> None:
    write_script(Path("train.py"), f"import time\nwhile time.process_time() < {cpu_s}: pass")
    smaragdine("run", "-o", "out", "train.py")
    assert info("out")["program_cpu_s"] > max(cpu_s, 0.005)
    assert show_json("out")["shares"]["cpu:0"]["program"] > 0.02
    # What a program does in its last 20 ms no sample sees; the share above rests on the kernel's own total.
    assert cpu_seconds(Path("out"), "program") > info("out")["program_cpu_s"] - 0.06


# The Python API, baseline and live


def test_record_block_measures_the_block_alone(tree: PowercapTree) -> None:
    write_script(
        Path("train.py"),
        """
        import subprocess, sys, time
        import smaragdine
        smaragdine.mark("before", 0)
        with smaragdine.record("out") as folder:
            smaragdine.mark("epoch_begin", 7)
            end = time.process_time() + 0.5
            while time.process_time() < end:
                pass
            smaragdine.mark("epoch_end", 7)
        smaragdine.mark("after", 0)
        assert folder.is_dir()
        whole = smaragdine.summarise(smaragdine.open("out"))
        print(smaragdine.summarise(folder).total_j == whole.total_j > 0)
        """,
    )
    tree.start({"cpu:0": 40.0})
    done = plain(sys.executable, "train.py", env=sensors(tree), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    shown = show_json("out")
    assert shown["status"] == "complete"
    assert shown["devices"]["cpu:0"]["energy_j"] == pytest.approx(40 * shown["duration_s"], rel=0.05)
    assert [epoch["index"] for epoch in shown["epochs"]] == [7]
    assert not {"before", "after"} & {mark["name"] for mark in shown["marks"]}
    assert cpu_seconds(Path("out"), "program") == pytest.approx(0.5, abs=0.15)


def test_record_block_that_raises_leaves_the_exception_and_a_recording() -> None:
    write_script(
        Path("train.py"),
        """
        import smaragdine
        with smaragdine.record("out"):
            raise ValueError("loss is nan")
        """,
    )
    done = plain(sys.executable, "train.py", capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: loss is nan"
    assert show_json("out")["status"] == "failed"


def test_record_block_inside_a_run_makes_two_recordings() -> None:
    write_script(
        Path("train.py"),
        """
        import smaragdine, time
        smaragdine.mark("outside", 1)
        with smaragdine.record("inner"):
            smaragdine.mark("inside", 2)
            time.sleep(0.2)
        smaragdine.mark("outside", 3)
        """,
    )
    done = smaragdine("run", "-o", "outer", "train.py")
    assert done.returncode == 0, done.stderr
    marks = {
        run: [(m["name"], m["index"]) for m in show_json(run)["marks"] if m["source"] == "user"]
        for run in ("outer", "inner")
    }
    assert marks == {"outer": [("outside", 1), ("outside", 3)], "inner": [("inside", 2)]}


def test_baseline_is_subtracted(tree: PowercapTree) -> None:
    tree.start({"cpu:0": 10.0, "dram:0": 2.0})
    done = smaragdine("baseline", "--seconds", "1", "-o", "idle", env=sensors(tree))
    assert (done.returncode, done.stdout) == (0, "")
    assert "recording: idle" in done.stderr
    tree.stop()
    tree.start({"cpu:0": 35.0, "dram:0": 2.0})
    smaragdine("run", "-o", "out", "sleep", "1", env=sensors(tree))
    shown = show_json("out", "--subtract", "idle")
    above = shown["above_idle"]
    assert above["cpu:0"]["idle_w"] == pytest.approx(10.0, rel=0.03)
    assert above["cpu:0"]["net_j"] == pytest.approx(25.0 * shown["duration_s"], rel=0.05)
    assert above["dram:0"]["net_j"] == pytest.approx(0.0, abs=0.3)
    table = smaragdine("show", "out", "--subtract", "idle")
    assert (table.returncode, table.stderr) == (0, "")
    assert "above idle" in table.stdout


def test_live_without_a_terminal_says_so_once_and_records(here: Path) -> None:
    done = smaragdine("run", "--live", "-o", "out", "sh", "-c", "echo out; sleep 1.2")
    assert (done.returncode, done.stdout) == (0, "out\n")
    assert len([line for line in done.stderr.splitlines() if "--live" in line]) == 1
    assert "\x1b" not in done.stderr
    assert show_json("out")["status"] == "complete"


class Terminal:
    """A `smaragdine …` on a terminal of its own, and all it writes there."""

    def __init__(
        self,
        words: list[str],
        size: tuple[int, int] = (24, 100),
        env: dict[str, str] | None = None,
        stdout: int | None = None,
    ) -> None:
        self._written = b""
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self._master = master

        def control() -> None:
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [*SMARAGDINE, *words],
            stdin=slave,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            env=environment({"TERM": "xterm-256color", **(env or {})}),
            start_new_session=True,
            preexec_fn=control,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self._master, 4096):
                self._written += chunk

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code

    def text(self) -> str:
        return self._written.decode()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)
        os.close(self._master)


PRINTS_LINES = """
import sys, time
for i in range(30):
    sys.stdout.buffer.write(b"line %d\\n" % i)
    sys.stdout.buffer.flush()
    time.sleep(0.08)
"""


def test_live_leaves_the_programs_piped_bytes_alone(tmp_path: Path) -> None:
    tree = PowercapTree(tmp_path / "powercap", packages=1)
    tree.start({"cpu:0": 40.0, "dram:0": 3.0})
    write_script(Path("train.py"), PRINTS_LINES)
    with open("stdout", "wb") as file:
        terminal = Terminal(
            ["run", "--live", "-o", "out", "train.py"], env=sensors(tree), stdout=file.fileno()
        )
        with terminal:
            assert terminal.end() == 0
    tree.close()
    assert Path("stdout").read_bytes() == b"".join(b"line %d\n" % i for i in range(30))
    text = terminal.text()
    assert re.search(r"cpu:0 (39|40|41)[.\d]* W", text)
    assert re.search(r"so far [\d.]+ J", text)
    assert "recording: out" in text


def test_live_line_leaves_the_screen_as_the_program_wrote_it() -> None:
    write_script(Path("train.py"), PRINTS_LINES)
    with Terminal(["run", "--live", "-o", "out", "train.py"], size=(12, 160)) as terminal:
        assert terminal.end() == 0
    screen = Screen(12, 160)
    screen.feed(terminal.text())
    everything = [line.rstrip() for line in (*screen.gone, *screen.lines)]
    lines = [line for line in everything if line.startswith("line ")]
    assert lines == [f"line {i}" for i in range(30)]
    assert screen.region == (0, 11), "the scrolling region is reset"
    assert screen.statuses, "the status line was on the last row"
    assert not any("so far" in line for line in screen.lines), "the status line is gone at the end"


def test_live_resets_the_terminal_after_control_c() -> None:
    write_script(Path("train.py"), 'import time; open("ready", "w").close(); time.sleep(600)')
    with Terminal(["run", "--live", "train.py"], size=(12, 160)) as terminal:
        assert wait_for(Path("ready").exists)
        assert wait_for(lambda: "so far" in terminal.text())
        terminal.type(b"\x03")
        assert terminal.end() == -signal.SIGINT
    screen = Screen(12, 160)
    screen.feed(terminal.text())
    assert screen.region == (0, 11)


@pytest.mark.parametrize("size", [(0, 0), (1, 100)])
def test_live_on_a_terminal_without_room_sends_no_impossible_region(size: tuple[int, int]) -> None:
    with Terminal(["run", "--live", "sleep", "1.3"], size=size) as terminal:
        assert terminal.end() == 0
    assert not re.search(r"\x1b\[1;(-\d+|0)r|\x1b\[0;1H", terminal.text())


class Screen:
    """As much of a VT100 as the status line uses. `gone` is what scrolled off the top."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.lines = [""] * rows
        self.gone: list[str] = []
        self.statuses: list[str] = []
        self.region = (0, rows - 1)
        self.row = self.column = 0
        self._saved = (0, 0)

    def feed(self, text: str) -> None:
        token = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b([78])|([\r\n])|([^\x1b\r\n]+)")
        at = 0
        for match in token.finditer(text):
            assert match.start() == at, f"unknown sequence {text[at : match.start()]!r}"
            at = match.end()
            numbers, command, cursor, move, written = match.groups()
            if written:
                self._write(written)
            elif move:
                self._move(move)
            elif cursor:
                self._cursor(cursor)
            else:
                self._command(command, [int(n) for n in numbers.strip("?").split(";") if n])
        assert at == len(text)

    def _write(self, text: str) -> None:
        line = self.lines[self.row].ljust(self.column)
        assert len(text) + self.column <= self.columns, "this screen does not wrap"
        self.lines[self.row] = line[: self.column] + text + line[self.column + len(text) :]
        self.column += len(text)
        if "so far" in text:
            assert self.row == self.rows - 1
            self.statuses.append(text)

    def _move(self, character: str) -> None:
        top, bottom = self.region
        if character == "\r":
            self.column = 0
        elif self.row == bottom:
            self.gone.append(self.lines.pop(top))
            self.lines.insert(bottom, "")
        elif self.row < self.rows - 1:
            self.row += 1

    def _cursor(self, which: str) -> None:
        if which == "7":
            self._saved = (self.row, self.column)
        else:
            self.row, self.column = self._saved

    def _command(self, command: str, numbers: list[int]) -> None:
        if command == "r":
            top, bottom = numbers or [1, self.rows]
            assert 1 <= top < bottom <= self.rows
            self.region, self.row, self.column = (top - 1, bottom - 1), 0, 0
        elif command == "H":
            self.row, self.column = (numbers or [1, 1])[0] - 1, (numbers or [1, 1])[1] - 1
        elif command == "K":
            self.lines[self.row] = "" if numbers == [2] else self.lines[self.row][: self.column]
        elif command == "A":
            self.row = max(self.row - (numbers or [1])[0], 0)
        else:
            assert command in "mhl", f"unknown command {command}"


def test_more_descriptors_than_select_can_hold(tmp_path: Path) -> None:
    opener = (
        "import os, sys, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "for _ in range(1200): os.set_inheritable(os.open('/dev/null', os.O_RDONLY), True)\n"
        "words = ['-m', 'smaragdine', 'run', '-o', 'out', '--', 'sh', '-c', 'exit 4']\n"
        "os.execv(sys.executable, [sys.executable, *words])"
    )
    done = subprocess.run(
        [sys.executable, "-c", opener], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 4, done.stderr
    assert show_json("out")["status"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGXCPU, signal.SIGRTMIN, signal.SIGCONT])
def test_whatever_can_be_caught_reaches_the_program(number: int) -> None:
    write_script(
        Path("train.py"),
        f"""
        import signal, sys, time
        signal.signal({int(number)}, lambda *_: sys.exit(6))
        open("ready", "w").close()
        time.sleep(600)
        """,
    )
    process = start("run", "-o", "out", "train.py")
    assert wait_for(Path("ready").exists)
    os.kill(process.pid, number)
    assert finish(process)[0] == 6


def test_a_stop_of_run_alone_reaches_the_program_and_a_continue_too() -> None:
    # Handled, because the kernel ignores the default in a process group that no shell controls.
    write_script(
        Path("train.py"),
        """
        import signal, sys, time
        signal.signal(signal.SIGTSTP, lambda *_: open("stopped", "w").close())
        signal.signal(signal.SIGCONT, lambda *_: sys.exit(6))
        open("ready", "w").close()
        time.sleep(600)
        """,
    )
    process = start("run", "-o", "out", "train.py")
    assert wait_for(Path("ready").exists)

    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    os.kill(process.pid, signal.SIGTSTP)
    assert wait_for(Path("stopped").exists)
    assert wait_for(lambda: state(process.pid) == "T")
    os.kill(process.pid, signal.SIGCONT)
    assert finish(process)[0] == 6


def test_when_the_monitor_died_the_recording_says_which_seconds_are_missing() -> None:
    process = start("run", "-o", "out", "--", "sleep", "4")
    recorder = wait_for(lambda: recorder_of(process.pid))
    time.sleep(1.5)
    os.kill(recorder, signal.SIGKILL)
    assert finish(process)[0] == 0
    shown = show_json("out")
    died_ns = next(mark["t_ns"] for mark in shown["marks"] if mark["name"] == "monitor_died")
    for device in shown["devices"].values():
        # A machine that pauses leaves others.
        gap = next(each for each in device["missing"] if each[1] > died_ns)
        assert gap[0] <= died_ns + 50_000_000
        assert device["missing_s"] == pytest.approx(
            sum(end - begin for begin, end in device["missing"]) * 1e-9
        )
