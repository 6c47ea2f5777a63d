"""Giving up root, for real: what is gone stays gone, what was open stays open."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli import alive, wait_for
from powercap_fake import PowercapTree
from smaragdine import privilege
from smaragdine.daemon import parent as counter_files
from smaragdine.daemon.parent import Parent, run_unprivileged
from smaragdine.errors import UserError
from unprivileged import NOBODY

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has privileges to give up")

SECRET = "the secret of root"
SYS_PTRACE = 1 << 19


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user may enter; pytest's own are root's alone."""
    path = Path(tempfile.mkdtemp(prefix="smaragdine-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def secret(folder: Path) -> Path:
    path = folder / "secret"
    path.write_text(SECRET)
    path.chmod(0o400)
    return path


@pytest.fixture
def tree(folder: Path) -> Iterator[PowercapTree]:
    with PowercapTree(folder / "sys", packages=1, layout="links") as tree:
        for counter in folder.rglob("energy_uj"):
            counter.chmod(0o400)
        yield tree


def forked(work: Callable[[], Any]) -> Any:
    """What `work` returns in a process of its own: nobody gets root back after these tests."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        try:
            answer = {"value": work()}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        os.write(send, json.dumps(answer).encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    answer = json.loads(text)
    assert "error" not in answer, answer["trace"]
    return answer["value"]


def refused(call: Callable[[], Any]) -> str | None:
    """The name of the error, None where there was none."""
    try:
        call()
    except OSError as error:
        return type(error).__name__
    return None


def status_of_self() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_nothing_is_left_but_what_was_open(secret: Path) -> None:
    def work() -> dict[str, Any]:
        os.setgroups([4, 27])
        fd = os.open(secret, os.O_RDONLY)
        words = privilege.drop("nobody")
        return {
            "words": words,
            "status": status_of_self(),
            "secret": refused(lambda: os.open(secret, os.O_RDONLY)),
            "shadow": refused(lambda: os.open("/etc/shadow", os.O_RDONLY)),
            "root again": refused(lambda: os.setuid(0)),
            "effective": refused(lambda: os.seteuid(0)),
            "groups": refused(lambda: os.setgroups([0])),
            "read": os.pread(fd, 100, 0).decode(),
            "core": resource.getrlimit(resource.RLIMIT_CORE),
            "memory": refused(lambda: os.open("/proc/self/mem", os.O_RDONLY)),
        }

    seen = forked(work)
    status = seen["status"]
    assert status["Uid"].split() == status["Gid"].split() == [str(NOBODY)] * 4
    assert status["Groups"] == ""
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    for what in ("secret", "shadow", "root again", "effective", "groups", "memory"):
        assert seen[what] == "PermissionError", what
    assert seen["read"] == SECRET
    assert seen["core"] == [0, 0]
    assert seen["words"].startswith("user nobody")


def test_only_the_capability_that_is_kept() -> None:
    def work() -> dict[str, str]:
        privilege.drop("nobody", frozenset({"CAP_SYS_PTRACE"}))
        return status_of_self()

    status = forked(work)
    assert int(status["CapPrm"], 16) == int(status["CapEff"], 16) == SYS_PTRACE
    assert {int(status[name], 16) for name in ("CapInh", "CapBnd", "CapAmb")} == {0}
    assert status["Uid"].split() == [str(NOBODY)] * 4


def test_a_setuid_program_gives_nothing_back(folder: Path) -> None:
    program = folder / "id"
    shutil.copy("/usr/bin/id", program)
    program.chmod(0o4755)

    def who() -> str:
        return subprocess.run([program, "-u"], capture_output=True, text=True, check=True).stdout.strip()

    def only_another_user() -> str:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        return who()

    def dropped() -> str:
        privilege.drop("nobody")
        return who()

    assert forked(only_another_user) == "0"  # it would work
    assert forked(dropped) == str(NOBODY)


def test_threads_from_before_are_noticed() -> None:
    def work(fenced: bool) -> str:
        end = threading.Event()
        if fenced:
            privilege.fence()
        threading.Thread(target=end.wait, daemon=True).start()
        try:
            return privilege.drop("nobody")
        except RuntimeError as error:
            return str(error)

    assert "new privileges are possible" in forked(lambda: work(fenced=False))
    assert forked(lambda: work(fenced=True)).startswith("user nobody")


def test_a_lane_may_still_be_early() -> None:
    if not int(status_of_self()["CapEff"], 16) >> privilege.CAPABILITIES["CAP_SYS_RESOURCE"] & 1:
        pytest.skip("this root may not raise limits")

    def work() -> list[Any]:
        privilege.drop("nobody")
        return [resource.getrlimit(resource.RLIMIT_RTPRIO)[0], resource.getrlimit(resource.RLIMIT_NICE)[0]]

    rtprio, nice = forked(work)
    assert rtprio == -1 or rtprio >= 1
    assert nice == -1 or nice >= 30


def test_an_ordinary_user_stays_and_gives_up_the_rest() -> None:
    def work() -> list[Any]:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        try:
            privilege.drop("daemon")
        except UserError as error:
            return [str(error), privilege.drop(None), status_of_self()]
        return ["no error"]

    error, words, status = forked(work)
    assert error == "cannot become daemon: only root can. Start the daemon with sudo"
    assert words == "user nobody, as it was started; no capabilities"
    assert status["NoNewPrivs"] == "1"


@pytest.mark.parametrize("user", ["root", "0", "no-such-user", "4294900000"])
def test_accounts_that_will_not_do(user: str) -> None:
    with pytest.raises(UserError, match=r"cannot run as|there is no user"):
        privilege.find_user(user)


def test_a_folder_is_handed_over_once(folder: Path) -> None:
    state = folder / "state"
    state.mkdir(mode=0o755)
    (state / "old").write_text("")
    privilege.hand_over(state, "nobody")
    assert (state.stat().st_uid, (state / "old").stat().st_uid) == (NOBODY, NOBODY)
    assert state.stat().st_mode & 0o777 == 0o700
    # What its new owner puts there later is not touched again.
    (state / "link").symlink_to("/etc/shadow")
    privilege.hand_over(state, "nobody")
    assert (state / "link").lstat().st_uid == Path("/etc/shadow").stat().st_uid == 0
    state.chmod(0o777)
    os.chown(state, 0, 0)
    with pytest.raises(UserError, match="others than root may write"):
        privilege.hand_over(state, "nobody")


def test_only_counters_are_opened(folder: Path, tree: PowercapTree, secret: Path) -> None:
    zone = tree.zones["intel-rapl:0"]
    root = tree.root
    (zone / "secret").write_text(SECRET)
    for name, make in {
        "link": lambda path: path.symlink_to(secret),
        "hard": lambda path: path.hardlink_to(secret),
        "pipe": os.mkfifo,
        "folder": os.mkdir,
    }.items():
        (folder / "sys" / "class" / "powercap" / name).mkdir()
        make(root / name / "energy_uj")
    outside = folder / "outside"
    outside.mkdir()
    (outside / "energy_uj").write_text("1\n")
    (zone / "way-out").symlink_to(outside)
    roots, trees = [root], counter_files.real_trees([root])
    for good in (root / "intel-rapl:0" / "energy_uj", root / "intel-rapl:0:0" / "max_energy_range_uj"):
        fd = counter_files.allowed_file(str(good), roots, trees)
        assert os.pread(fd, 32, 0).strip().isdigit()
        os.close(fd)
    for bad in (
        "/etc/shadow",
        "/etc/energy_uj",
        f"{root}/../../outside/energy_uj",
        f"{root}/intel-rapl:0/../../../../outside/energy_uj",
        f"{root}/intel-rapl:0/way-out/energy_uj",
        f"{root}/intel-rapl:0/secret",
        f"{root}/intel-rapl:0/energy_uj\0",
        f"{root}/link/energy_uj",
        f"{root}/hard/energy_uj",
        f"{root}/pipe/energy_uj",
        f"{root}/folder/energy_uj",
        f"{outside}/energy_uj",
        "energy_uj",
        "",
    ):
        with pytest.raises((OSError, ValueError)):
            os.close(counter_files.allowed_file(bad, roots, trees))


def test_the_daemon_is_nobody_and_its_parent_opens_counters(tree: PowercapTree, secret: Path) -> None:
    path = tree.root / "intel-rapl:0" / "energy_uj"
    tree.add_joules("cpu:0", 1.5)

    def prepare() -> int:
        return os.open(path, os.O_RDONLY)

    receive, send = os.pipe()

    def serve(fd: int, parent: Parent) -> int:
        fresh = parent.open_file(path)
        seen = {
            "uids": os.getresuid(),
            "old": int(os.pread(fd, 32, 0)),
            "fresh": int(os.pread(fresh, 32, 0)),
            "inherited": os.get_inheritable(fresh),
            "by itself": refused(lambda: os.open(path, os.O_RDONLY)),
            "shadow": refused(lambda: os.open("/etc/shadow", os.O_RDONLY)),
            "root again": refused(lambda: os.setresuid(0, 0, 0)),
            "secret": refused(lambda: parent.open_file(secret)),
            "shadow, asked for": refused(lambda: parent.open_file("/etc/shadow")),
            "too long": refused(lambda: parent.open_file("/" * 5000)),
            "not there": refused(lambda: parent.open_file(tree.root / "gone" / "energy_uj")),
            "no helper": refused(lambda: parent.start("sh")),
            "still answers": int(os.pread(parent.open_file(path), 32, 0)),
        }
        os.write(send, json.dumps(seen).encode())
        return 7

    assert forked(lambda: run_unprivileged(prepare, serve, user="nobody", counters=[tree.root])) == 7
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        assert json.load(pipe) == {
            "uids": [NOBODY] * 3,
            "old": 1_500_000,
            "fresh": 1_500_000,
            "inherited": False,
            "by itself": "PermissionError",
            "shadow": "PermissionError",
            "root again": "PermissionError",
            "secret": "PermissionError",
            "shadow, asked for": "PermissionError",
            "too long": "OSError",
            "not there": "FileNotFoundError",
            "no helper": "PermissionError",
            "still answers": 1_500_000,
        }


def test_a_late_answer_is_nobody_elses(tree: PowercapTree) -> None:
    """The parent is stopped while it is asked, and answers when nobody waits any more."""
    path = tree.root / "intel-rapl:0" / "energy_uj"
    tree.add_joules("dram:0", 2.5)

    def serve(_: None, parent: Parent) -> int:
        # Its socket, with little patience.
        hasty = Parent(parent._connection, timeout_s=0.05)
        os.kill(os.getppid(), signal.SIGSTOP)
        late = refused(lambda: hasty.open_file(path))
        os.kill(os.getppid(), signal.SIGCONT)
        parent._number = hasty._number
        fd = parent.open_file(tree.root / "intel-rapl:0:1" / "energy_uj")
        return 7 if late == "TimeoutError" and int(os.pread(fd, 32, 0)) == 2_500_000 else 1

    keep = frozenset({"CAP_KILL"})
    run = lambda: run_unprivileged(lambda: None, serve, user="nobody", keep=keep, counters=[tree.root])  # noqa: E731
    assert forked(run) == 7


def test_what_the_parent_keeps() -> None:
    def work() -> list[int]:
        run_unprivileged(lambda: None, lambda _, parent: 0, user="nobody")
        status = status_of_self()
        return [int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapInh")]

    keeps = 1 << 5 | 1 << 21  # CAP_KILL, CAP_SYS_ADMIN
    own = int(status_of_self()["CapPrm"], 16)
    assert forked(work) == [keeps & own, keeps & own, keeps & own, 0]


HELPER = """
import os, sys
print(os.getuid(), flush=True)
sys.stdin.read()
open(sys.argv[1], "w").write("put back")
"""


@pytest.mark.parametrize("victim", ["daemon", "parent", "nobody, but asked to end"])
def test_whoever_is_killed_all_end_and_the_helper_puts_back(folder: Path, victim: str) -> None:
    done, report = folder / "done", folder / "report"
    report.touch()
    report.chmod(0o666)
    started = folder / "helper.py"
    started.write_text(HELPER)

    def serve(_: None, parent: Parent) -> int:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
        read_fd, _write_fd = parent.start("helper")
        uid = int(os.read(read_fd, 16))
        report.write_text(json.dumps({"daemon": os.getpid(), "helper uid": uid, "uid": os.getuid()}))
        while True:
            signal.pause()

    helpers = {"helper": [sys.executable, str(started), str(done)]}
    pid = os.fork()
    if pid == 0:
        os._exit(run_unprivileged(lambda: None, serve, user="nobody", helpers=helpers))
    seen = json.loads(wait_for(report.read_text))
    daemon = seen["daemon"]
    assert (seen["helper uid"], seen["uid"]) == (0, NOBODY)
    if victim == "daemon":
        os.kill(daemon, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGKILL if victim == "parent" else signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code == {"daemon": 128 + 9, "parent": -9}.get(victim, 3)
    assert wait_for(lambda: not alive(daemon))
    # The parent waits for it; where the parent was killed, it comes all the same.
    if victim != "parent":
        assert done.exists()
    assert wait_for(done.exists)


def test_a_daemon_that_fails_to_start_says_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    def prepare() -> None:
        raise UserError("no such socket folder", remedy="Make it")

    assert forked(lambda: run_unprivileged(prepare, lambda _, parent: 0, user="nobody")) == 2
    assert capfd.readouterr().err == "smaragdine: no such socket folder. Make it\n"
