from __future__ import annotations

import contextlib
import math
import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

import pytest

import machine_fake
from cli import TIMEOUT_S
from smaragdine.clock import Clock
from smaragdine.sensors import cpu as cpuinfo
from smaragdine.sensors import discover, processes
from smaragdine.sensors.cpu import Activity, CpuInfo, open_activity
from smaragdine.sensors.processes import ProcessTree, process_clock

ALL_CPUS = dict.fromkeys(range(os.cpu_count() or 1), 0)

# Burning means CPU time, not wall time: on a busy machine the truth stays the truth.
PROLOGUE = """
import os, subprocess, sys, threading, time

def burn(seconds, clock=time.thread_time):
    end = clock() + seconds
    while clock() < end:
        sum(range(500))

def child(code, **more):
    code = f"PROLOGUE = {PROLOGUE!r}\\nexec(PROLOGUE)\\n{code}"
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code], **more)
"""


def start(code: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A program that waits for a line before it begins, so that the tree is watching by then."""
    whole = f"PROLOGUE = {PROLOGUE!r}\nexec(PROLOGUE)\nsys.stdin.readline()\n{textwrap.dedent(code)}"
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", whole],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )


def go(program: subprocess.Popen[bytes]) -> None:
    assert program.stdin is not None
    program.stdin.write(b"\n")
    program.stdin.flush()


@dataclass
class Watched:
    """A tree updated every few milliseconds on a thread, as the sampler does it."""

    tree: ProcessTree
    stop: threading.Event = field(default_factory=threading.Event)
    seen: set[int] = field(default_factory=set)
    totals: list[float] = field(default_factory=list)

    def run(self) -> None:
        while not self.stop.is_set():
            self.look()
            time.sleep(0.004)

    def look(self) -> None:
        self.tree.update()
        self.seen |= self.tree.pids
        self.totals.append(sum(self.tree.cpu_s.values()))


def watch_to_the_end(program: subprocess.Popen[bytes], tree: ProcessTree) -> tuple[Watched, float]:
    """What the tree saw, and what the kernel charged to the program and the children it waited for."""
    watched = Watched(tree)
    thread = threading.Thread(target=watched.run)
    thread.start()
    go(program)
    _, status, usage = os.wait4(program.pid, 0)
    program.returncode = os.waitstatus_to_exitcode(status)
    watched.stop.set()
    thread.join()
    for stream in (program.stdin, program.stdout):
        assert stream is not None
        stream.close()
    tree.close()
    assert program.returncode == 0
    return watched, usage.ru_utime + usage.ru_stime


def eventually(condition: Callable[[], bool], seconds: float = TIMEOUT_S) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


def test_the_clock_of_a_process_is_its_cpu_time():
    spent_ns = time.clock_gettime_ns(process_clock(os.getpid()))
    assert spent_ns == pytest.approx(time.process_time_ns(), abs=20_000_000)


def test_threads_are_counted_once_and_are_no_processes():
    program = start("""
        threads = [threading.Thread(target=burn, args=(0.08,)) for _ in range(5)]
        [t.start() for t in threads]; burn(0.1); [t.join() for t in threads]
    """)
    watched, truth_s = watch_to_the_end(program, ProcessTree(program.pid, ALL_CPUS))
    assert watched.seen == {program.pid}
    assert truth_s > 0.5
    assert watched.totals[-1] == pytest.approx(truth_s, abs=0.03)
    assert watched.totals == sorted(watched.totals)


@contextlib.contextmanager
def numbers_about_to_start_over() -> Iterator[None]:
    """Processes get the largest numbers there are and then the smallest; the numbers go on as they were."""
    last_pid = Path("/proc/sys/kernel/ns_last_pid")
    before = last_pid.read_text()
    try:
        last_pid.write_text(str(int(Path("/proc/sys/kernel/pid_max").read_text()) - 8))
    except OSError as error:
        pytest.skip(f"cannot set the number of the next process: {error}")
    yield
    last_pid.write_text(before)


@pytest.mark.parametrize("numbers", [contextlib.nullcontext, numbers_about_to_start_over])
def test_children_and_grandchildren_that_come_and_go(
    numbers: Callable[[], contextlib.AbstractContextManager[None]],
):
    with numbers():
        children_and_grandchildren_that_come_and_go()


def children_and_grandchildren_that_come_and_go() -> None:
    program = start("""
        for _ in range(3):
            # Each lives long enough to be seen on a machine that stalls, too.
            inner = "time.sleep(0.5); burn(0.12)"
            parts = [child(f"burn(0.05); child('{inner}').wait(); burn(0.05)") for _ in range(2)]
            burn(0.05)
            [p.wait() for p in parts]
    """)
    watched, truth_s = watch_to_the_end(program, ProcessTree(program.pid, ALL_CPUS))
    assert len(watched.seen) == 1 + 6 + 6
    assert truth_s > 1.4
    # Each process may end some milliseconds after it was last looked at.
    assert watched.totals[-1] == pytest.approx(truth_s, rel=0.1)
    assert watched.totals[-1] <= truth_s + 0.03
    assert watched.totals == sorted(watched.totals)


def test_only_numbers_handed_out_since_the_last_look_are_looked_at(tmp_path: Path):
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/pid_max").write_text("1000\n")
    (tmp_path / "4711").mkdir()
    everybody = [4711]
    assert list(processes.fresh_pids(tmp_path, 500, 503)) == [501, 502, 503]
    assert list(processes.fresh_pids(tmp_path, 997, 301)) == [998, 999, 300, 301]
    assert list(processes.fresh_pids(tmp_path, 999, 300)) == [300]
    # More than it is worth, on either side of the largest; and numbers that somebody has set back.
    assert list(processes.fresh_pids(tmp_path, 500, 565)) == everybody
    assert list(processes.fresh_pids(tmp_path, 970, 340)) == everybody
    assert list(processes.fresh_pids(tmp_path, 997, 20)) == everybody


def test_an_orphan_is_found_by_its_marker():
    """A daemon's second fork: its parent is gone before anybody could see whose it was."""
    marker = f"SMARAGDINE_TEST_RUN=orphan-{os.getpid()}"
    name, _, value = marker.partition("=")
    code = """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                burn(0.3)
                print(os.getpid(), flush=True)
                sys.stdin.readline()
            os._exit(0)
        os.wait()
        sys.stdin.readline()
    """
    program = start(code, {name: value})
    trees = [ProcessTree(program.pid, ALL_CPUS, marker.encode()), ProcessTree(program.pid, ALL_CPUS)]
    for tree in trees:
        tree._next_scan_ns = time.monotonic_ns() + 10**12
    go(program)
    assert program.stdout is not None
    orphan = int(program.stdout.readline())
    for tree in trees:
        tree._next_scan_ns = 0
        tree.update()
    assert [orphan in tree.pids for tree in trees] == [True, False]
    assert sum(trees[0].cpu_s.values()) >= 0.3
    program.communicate(b"\n\n")
    for tree in trees:
        tree.close()


def test_a_child_that_was_followed_is_not_counted_again_when_it_ends():
    """Once waited for, all of its time stands in its parent's account as well."""
    program = start("""
        part = child("burn(0.4); print(flush=True); sys.stdin.readline()", stdin=subprocess.PIPE)
        sys.stdin.readline()
        part.communicate(b"\\n")
        child("").wait()
        print(flush=True)
        sys.stdin.readline()
    """)
    assert program.stdin is not None
    assert program.stdout is not None
    tree = ProcessTree(program.pid, ALL_CPUS)
    go(program)
    assert eventually(lambda: (tree.update(), sum(tree.cpu_s.values()) > 0.4)[1])
    program.stdout.readline()
    tree.update()
    before_s = sum(tree.cpu_s.values())
    go(program)
    program.stdout.readline()
    tree._next_scan_ns = 0
    for _ in range(3):
        tree.update()
    assert sum(tree.cpu_s.values()) < before_s + 0.15
    program.communicate(b"\n")
    tree.close()


def test_a_child_that_ends_in_the_middle_of_a_look_is_counted_once(monkeypatch: pytest.MonkeyPatch):
    """Clocks first, then the parents' accounts: a worker of an hour's CPU time may not stand in both."""
    program = start("""
        part = child("burn(0.4); sys.stdin.readline()", stdin=subprocess.PIPE)
        sys.stdin.readline()
        part.communicate(b"\\n")
        print(flush=True)
        sys.stdin.readline()
    """)
    assert program.stdout is not None
    tree = ProcessTree(program.pid, ALL_CPUS)
    go(program)
    assert eventually(lambda: (tree.update(), sum(tree.cpu_s.values()) > 0.4)[1])
    before_s = sum(tree.cpu_s.values())
    clock_gettime_ns = time.clock_gettime_ns
    left = [len(tree.pids)]

    def ends_after_the_last_clock(clock_id: int) -> int:
        cpu_ns = clock_gettime_ns(clock_id)
        left[0] -= 1
        if left[0] == 0:
            go(program)
            assert program.stdout is not None
            program.stdout.readline()
        return cpu_ns

    monkeypatch.setattr(time, "clock_gettime_ns", ends_after_the_last_clock)
    tree._last_pid -= 1  # something was started
    tree._next_scan_ns = 0
    tree.update()
    monkeypatch.undo()
    tree.update()
    assert sum(tree.cpu_s.values()) < before_s + 0.15
    program.communicate(b"\n")
    tree.close()


def test_children_too_short_to_be_seen_are_counted_too():
    """Forty children of some 10 ms each, looked for every 20 ms: their time is in their parent's account."""
    program = start("""
        for _ in range(40):
            subprocess.run(["/bin/sh", "-c", "i=0; while [ $i -lt 8000 ]; do i=$((i+1)); done"])
    """)
    watched, truth_s = watch_to_the_end(program, ProcessTree(program.pid, ALL_CPUS))
    assert watched.totals[-1] == pytest.approx(truth_s, rel=0.25)


def test_others_are_not_the_program():
    stranger = start("burn(0.2)")
    program = start("burn(0.1)")
    tree = ProcessTree(program.pid, ALL_CPUS, b"NO_SUCH=marker")
    go(stranger)
    watched, truth_s = watch_to_the_end(program, tree)
    stranger.communicate()
    assert stranger.pid not in watched.seen
    assert watched.totals[-1] == pytest.approx(truth_s, abs=0.03)


def test_the_observer_itself_is_left_out():
    """`with smaragdine.record()`: the sampler is a child of the process it watches."""
    tree = ProcessTree(os.getppid(), ALL_CPUS, include_past=False)
    try:
        tree.update()
        assert os.getppid() in tree.pids
        assert os.getpid() not in tree.pids
        tree._last_pid = 0
        tree._next_scan_ns = 0
        tree.update()
        assert os.getpid() not in tree.pids
    finally:
        tree.close()


def test_the_past_counts_only_when_asked_for():
    program = start("burn(0.2); print(flush=True); sys.stdin.readline()")
    go(program)
    assert program.stdout is not None
    program.stdout.readline()
    with_past = ProcessTree(program.pid, ALL_CPUS)
    without = ProcessTree(program.pid, ALL_CPUS, include_past=False)
    with_past.update()
    without.update()
    assert sum(with_past.cpu_s.values()) >= 0.2
    assert sum(without.cpu_s.values()) < 0.1
    program.communicate(b"\n")
    with_past.close()
    without.close()


@pytest.mark.parametrize("last_pid", [0, 1, 4_000_000])
def test_process_numbers_that_start_over(last_pid: int):
    """After the highest number they begin again near 0: then every process is looked at."""
    program = start(
        "p = child('sys.stdin.readline()', stdin=subprocess.PIPE); sys.stdin.readline(); p.kill()"
    )
    tree = ProcessTree(program.pid, ALL_CPUS)
    tree._next_scan_ns = time.monotonic_ns() + 10**12  # the child is born while nobody looks
    go(program)
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
    assert eventually(lambda: bool(children.read_text().split()))
    child = int(children.read_text().split()[0])
    tree.update()
    assert child not in tree.pids
    tree._last_pid = last_pid
    tree._next_scan_ns = 0
    tree.update()
    assert child in tree.pids
    program.communicate(b"\n\n")
    tree.close()


def test_more_new_processes_than_are_probed_one_by_one():
    program = start("""
        parts = [subprocess.Popen(["sleep", "20"]) for _ in range(70)]
        print("up", flush=True)
        sys.stdin.readline()
        [p.kill() for p in parts]; [p.wait() for p in parts]
    """)
    tree = ProcessTree(program.pid, ALL_CPUS)
    tree._next_scan_ns = time.monotonic_ns() + 10**12
    go(program)
    assert program.stdout is not None
    program.stdout.readline()
    tree._next_scan_ns = 0
    tree.update()
    assert len(tree.pids) == 71
    program.communicate(b"\n")
    tree.update()
    assert eventually(lambda: (tree.update(), not tree.pids)[1])
    tree.close()


def test_a_number_handed_out_again_does_not_run_backwards():
    program = start("burn(0.05); sys.stdin.readline()")
    tree = ProcessTree(program.pid, ALL_CPUS)
    go(program)
    assert eventually(lambda: (tree.update(), sum(tree.cpu_s.values()) > 0.05)[1])
    before_s = sum(tree.cpu_s.values())
    tree._processes[program.pid].last_ns += 10_000_000_000  # as if that number had been another's
    tree.update()
    assert sum(tree.cpu_s.values()) >= before_s
    program.communicate(b"\n")
    tree.close()


def test_a_program_that_is_already_gone_is_no_error():
    program = start("")
    program.communicate(b"\n")
    tree = ProcessTree(program.pid, ALL_CPUS)
    tree.update()
    assert tree.pids == frozenset()
    assert sum(tree.cpu_s.values()) == 0
    tree.close()


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPUs")
def test_time_goes_to_the_socket_the_threads_ran_on():
    two = {cpu: cpu % 2 for cpu in range(os.cpu_count() or 1)}
    program = start("os.sched_setaffinity(0, {1}); burn(0.8)")
    watched, truth_s = watch_to_the_end(program, ProcessTree(program.pid, two))
    # Where it ran between two looks nobody knows, and it moves at its start.
    assert watched.tree.cpu_s[1] > 0.7 * truth_s
    assert sum(watched.tree.cpu_s.values()) == pytest.approx(truth_s, abs=0.03)


def test_no_file_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    program = start("[threading.Thread(target=burn, args=(0.1,)).start() for _ in range(5)]; burn(0.3)")
    go(program)
    two = {cpu: cpu % 2 for cpu in range(4)}
    tree = ProcessTree(program.pid, two)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        tree.update()
    program.communicate()
    tree.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_shared_tree_holds_no_files_of_its_threads():
    """A daemon has many trees of many threads: their files would be all that may be open."""
    two = {cpu: cpu % 2 for cpu in range(os.cpu_count() or 1)} | {-1: 1}
    program = start("[threading.Thread(target=burn, args=(0.2,)).start() for _ in range(5)]; burn(0.2)")
    tree = ProcessTree(program.pid, two, shared=True)
    before = len(os.listdir("/proc/self/fd"))
    go(program)
    assert eventually(lambda: (tree._weigh_sockets(), len(tree._threads) > 3)[1])
    assert len(os.listdir("/proc/self/fd")) == before
    program.communicate()
    tree.close()


# --- where threads are --------------------------------------------------------------------------------------


@dataclass
class FakeThreads:
    """A /proc in which this process has the threads we say, on the CPUs we say."""

    root: Path
    now_ns: int = 10**9

    def clock(self) -> Clock:
        return Clock(wall_ns=lambda: self.now_ns + 10**18, mono_ns=lambda: self.now_ns)

    def tree(self, socket_of_cpu: Mapping[int, int]) -> ProcessTree:
        """This process's tree, which looks at every chance, whatever a look costs the machine at hand."""
        return ProcessTree(
            os.getpid(), socket_of_cpu, proc=self.root, clock=self.clock(), socket_scan_share=math.inf
        )

    def put(self, **cpu_of: int | None) -> None:
        """`t7=2`: thread 7 is on CPU 2; None: it has ended."""
        for name, cpu in cpu_of.items():
            folder = self.root / str(os.getpid()) / "task" / name[1:]
            folder.mkdir(parents=True, exist_ok=True)
            if cpu is None:
                (folder / "stat").unlink()
                folder.rmdir()
            else:
                (folder / "stat").write_text(f"7 (a) b) S {'0 ' * 35}{cpu} 0 0\n")


@pytest.fixture
def threads(tmp_path: Path) -> FakeThreads:
    (tmp_path / "loadavg").write_text("0.1 0.1 0.1 1/100 4711\n")
    return FakeThreads(tmp_path)


def look(tree: ProcessTree, threads: FakeThreads) -> set[tuple[int, int]]:
    """What a look 0.1 s later notes: (thread, socket). All of it is of that instant and this process."""
    threads.now_ns += 100_000_000
    tree.update()
    places = tree.drain_places()
    assert {(t_ns, pid) for t_ns, pid, _, _ in places} <= {(threads.now_ns + 10**18, os.getpid())}
    found = {(tid, socket) for _, _, tid, socket in places}
    assert len(found) == len(places)
    return found


def test_a_thread_is_noted_when_it_is_first_seen_and_when_it_moves(threads: FakeThreads):
    threads.put(t7=0, t8=1)
    tree = threads.tree({0: 0, 2: 0, 1: 1, 3: 1})
    assert look(tree, threads) == {(7, 0), (8, 1)}
    assert look(tree, threads) == set()
    threads.put(t7=2, t9=3)
    assert look(tree, threads) == {(9, 1)}  # 7 is on another CPU of the same socket
    threads.put(t7=3)
    assert look(tree, threads) == {(7, 1)}
    for _ in range(20):  # the seconds after the first, too
        assert look(tree, threads) == set()
    threads.put(t7=0)
    assert look(tree, threads) == {(7, 0)}
    threads.put(t8=None)
    assert look(tree, threads) == set()
    threads.put(t8=1)  # another thread of that number
    assert look(tree, threads) == {(8, 1)}
    tree.close()


def test_a_thread_to_and_fro_between_two_looks_is_noted_once(threads: FakeThreads):
    threads.put(t7=0)
    tree = threads.tree({0: 0, 1: 1})
    assert look(tree, threads) == {(7, 0)}
    for _ in range(25):
        threads.now_ns += 1_000_000
        threads.put(t7=1)
        tree.update()
        threads.put(t7=0)
        tree.update()
    assert tree.drain_places() == []
    threads.put(t7=1)
    assert look(tree, threads) == {(7, 1)}
    tree.close()


def test_a_number_handed_on_between_two_looks_is_looked_up_anew(threads: FakeThreads):
    threads.put(t7=0)
    tree = threads.tree({0: 0, 1: 1})
    assert look(tree, threads) == {(7, 0)}
    os.close(tree._threads[7].stat_fd)
    tree._threads[7].stat_fd = os.open(
        threads.root, os.O_RDONLY
    )  # as of a thread that is gone: it cannot be read
    assert look(tree, threads) == set()
    assert look(tree, threads) == {(7, 0)}
    tree.close()


def test_places_nobody_takes_do_not_pile_up(threads: FakeThreads, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "_MOST_PLACES", 2)
    threads.put(t7=0, t8=0, t9=0)
    tree = threads.tree({0: 0, 1: 1})
    for _ in range(5):
        threads.now_ns += 100_000_000
        tree.update()
    first = {tid for _, _, tid, _ in tree.drain_places()}
    assert len(first) == 2
    assert look(tree, threads) == {(tid, 0) for tid in {7, 8, 9} - first}
    tree.close()


def test_on_one_socket_nobody_looks(threads: FakeThreads):
    threads.put(t7=0)
    tree = threads.tree({0: 0, 1: 0})
    assert look(tree, threads) == set()
    tree.close()


# --- busy time ----------------------------------------------------------------------------------------------


@pytest.fixture
def half_busy_core() -> Iterator[None]:
    """One core at one half, in slices that would alias with a 10 ms tick."""
    code = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end:\n"
    code += "    t = time.monotonic() + .005\n    while time.monotonic() < t: pass\n    time.sleep(.005)"
    program = subprocess.Popen([sys.executable, "-I", "-S", "-c", code])
    assert eventually(lambda: time.clock_gettime_ns(process_clock(program.pid)) > 20_000_000)
    yield
    program.kill()
    program.wait()


def cpu_s_of_everybody() -> dict[int, float]:
    found: dict[int, float] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                found[int(name)] = time.clock_gettime(process_clock(int(name)))
    return found


def newest_pid() -> int:
    return int(Path("/proc/loadavg").read_text().split()[-1])


@pytest.mark.usefixtures("half_busy_core")
def test_a_half_busy_core_is_half_busy():
    before, pid_before = cpu_s_of_everybody(), newest_pid()
    activity = Activity(cpuinfo.read_cpuinfo())
    begun = cpu_s_of_everybody()
    began = time.monotonic()
    values: list[float] = []
    while time.monotonic() < began + 1.0 or len(values) <= 10:
        values.extend(value for _, channel, value in activity.read() if channel == 0)
        time.sleep(0.004)
    ending = cpu_s_of_everybody()
    values.extend(value for _, channel, value in activity.close() if channel == 0)
    after = cpu_s_of_everybody()
    assert values == sorted(values)
    # The machine may have other work to do: the truth is what the kernel charged to all processes together,
    # between what passed while the activity was looked at for certain and what passed around it.
    least_s = sum(ending[pid] - begun.get(pid, 0.0) for pid in ending)
    most_s = sum(after[pid] - before.get(pid, 0.0) for pid in after)
    assert least_s > 0.2
    assert values[-1] > least_s - 0.15
    if newest_pid() == pid_before and before.keys() <= after.keys():
        # Otherwise some may have gone, and are in nobody's sum.
        assert values[-1] < most_s + 0.15


@dataclass
class FakeProc:
    """/proc/stat of two sockets of two CPUs, and a clock, both moved by hand."""

    root: Path
    now_ns: int = 1_000_000_000
    idle: list[int] = field(default_factory=lambda: [100, 200, 300, 400])
    iowait: list[int] = field(default_factory=lambda: [10, 10, 10, 10])
    steal: list[int] = field(default_factory=lambda: [5, 5, 5, 5])
    offline: set[int] = field(default_factory=lambda: set[int]())

    def clock(self) -> Clock:
        return Clock(wall_ns=lambda: self.now_ns + 10**18, mono_ns=lambda: self.now_ns)

    def write(self) -> None:
        rows = list(zip(self.idle, self.iowait, self.steal, strict=True))
        total = [sum(column) for column in zip(*rows, strict=True)]
        lines = [
            f"cpu{cpu} 7 7 7 {i} {w} 0 0 {s} 0 0"
            for cpu, (i, w, s) in enumerate(rows)
            if cpu not in self.offline
        ]
        head = f"cpu  28 28 28 {total[0]} {total[1]} 0 0 {total[2]} 0 0"
        (self.root / "stat").write_text("\n".join([head, *lines, "intr 12345", "ctxt 1", ""]))

    def move(self, seconds: float, idle: list[int]) -> None:
        self.now_ns += round(seconds * 1e9)
        self.idle = [old + new for old, new in zip(self.idle, idle, strict=True)]
        self.write()


TWO_SOCKETS = CpuInfo("Test CPU", {0: (0, 2), 1: (1, 3)}, {0: 2, 1: 2})
ONE_SOCKET = CpuInfo("Test CPU", {0: (0, 1, 2, 3)}, {0: 4})


@pytest.fixture
def fake(tmp_path: Path) -> FakeProc:
    proc = FakeProc(tmp_path)
    proc.write()
    return proc


def busy(activity: Activity) -> dict[int, float]:
    return {c: round(value, 6) for _, c, value in activity.read() if c % 3 == 0}


def test_busy_time_of_two_sockets(fake: FakeProc):
    activity = Activity(TWO_SOCKETS, fake.root, clock=fake.clock())
    fake.move(1.0, idle=[100, 50, 25, 0])
    assert busy(activity) == {0: 0.75, 3: 1.5}
    fake.move(1.0, idle=[100, 100, 100, 100])
    assert busy(activity) == {0: 0.75, 3: 1.5}
    assert activity.busy_s(1) == (fake.now_ns + 10**18, pytest.approx(1.5))
    assert [c.name for c in activity.channels()] == [
        f"cpu:{socket} {quantity}" for socket in (0, 1) for quantity in ("busy", "program", "monitor")
    ]
    activity.close()


def test_busy_time_of_one_socket(fake: FakeProc):
    activity = Activity(ONE_SOCKET, fake.root, clock=fake.clock())
    fake.move(1.0, idle=[100, 50, 25, 0])
    assert busy(activity) == {0: 2.25}
    activity.close()


def test_waiting_for_disks_and_the_hypervisor_is_not_busy(fake: FakeProc):
    activity = Activity(ONE_SOCKET, fake.root, clock=fake.clock())
    fake.iowait = [60, 60, 60, 60]
    fake.steal = [55, 55, 55, 55]
    fake.move(1.0, idle=[0, 0, 0, 0])
    assert busy(activity) == {0: 0.0}
    activity.close()


def test_busy_time_never_decreases(fake: FakeProc):
    activity = Activity(ONE_SOCKET, fake.root, clock=fake.clock())
    fake.move(1.0, idle=[50, 50, 50, 50])
    assert busy(activity) == {0: 2.0}
    fake.move(0.05, idle=[50, 50, 50, 50])  # idle ticks arrive late and all at once
    assert busy(activity) == {0: 2.0}
    fake.iowait = [0, 0, 0, 0]  # iowait runs backwards at times
    fake.move(1.0, idle=[0, 0, 0, 0])
    assert busy(activity)[0] > 2.0
    activity.close()


def test_stat_is_read_no_more_often_than_it_changes(fake: FakeProc):
    assert 20 <= reads_in_a_second(fake, iter(int, 1)) <= 26


def reads_in_a_second(fake: FakeProc, costs_ms: Iterator[float]) -> int:
    """Each costs so much."""
    used_ns = [0, 0]

    def cpu_ns() -> int:
        # It is asked before and after.
        used_ns[0] += 1
        used_ns[1] += 0 if used_ns[0] % 2 else int(next(costs_ms) * 1e6)
        return used_ns[1]

    activity = Activity(ONE_SOCKET, fake.root, clock=fake.clock(), cpu_ns=cpu_ns)
    reads = 0
    for _ in range(250):
        fake.move(0.004, idle=[0, 0, 0, 0])
        reads += any(channel == 0 for _, channel, _ in activity.read())
    activity.close()
    return reads


def test_stat_is_read_less_often_where_that_is_dear(fake: FakeProc):
    assert 5 <= reads_in_a_second(fake, repeat(1.0)) <= 7  # every 200 ms: 0.5 % of a core
    assert 2 <= reads_in_a_second(fake, repeat(100.0)) <= 4  # but never less than every 500 ms


def test_one_dear_reading_is_followed_by_the_next(fake: FakeProc):
    """A machine that pauses in the midst of one must not make it look rarely."""
    assert 20 <= reads_in_a_second(fake, chain([0.05] * 5, [40.0], repeat(0.05))) <= 26


def test_a_long_stat_is_read_to_its_end(tmp_path: Path):
    """256 CPUs: the lines of the last ones are beyond the first 4096 bytes."""
    count = 256
    cpus = CpuInfo("Big", {0: tuple(range(128)), 1: tuple(range(128, 256))}, {0: 128, 1: 128})
    now = [10**9]
    clock = Clock(wall_ns=lambda: now[0], mono_ns=lambda: now[0])

    def write(idle: int) -> None:
        lines = [f"cpu{i} 1 2 3 {idle} 0 0 0 0 0 0" for i in range(count)]
        (tmp_path / "stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 1 2 3", ""]))

    write(1_000_000)
    activity = Activity(cpus, tmp_path, clock=clock)
    now[0] += 10**9
    write(1_000_050)
    assert busy(activity) == {0: 64.0, 3: 64.0}
    activity.close()


def test_shares_over_two_sockets_of_this_machine(tmp_path: Path):
    settings = discover.SensorSettings(proc_root=machine_fake.two_sockets(tmp_path / "proc"))
    cpus = cpuinfo.read_cpuinfo(settings.proc_root)
    if len(cpus.sockets) < 2:
        pytest.skip("needs two CPUs")
    activity, absent = open_activity(cpus, settings.proc_root, 4_000_000)
    assert activity is not None
    assert absent == []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = start("os.sched_setaffinity(0, {0}); burn(0.5)")
    activity.watch(program.pid)
    go(program)
    readings: list[tuple[int, int, float]] = []
    while program.poll() is None:
        readings.extend(activity.read())
        time.sleep(0.004)
    readings.extend(activity.close())
    program.communicate()
    names = [channel.name for channel in activity.channels()]
    last = {names[c]: value for _, c, value in readings}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    truth_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert last["cpu:0 program"] + last["cpu:1 program"] == pytest.approx(truth_s, abs=0.06)
    assert last["cpu:0 program"] > last["cpu:1 program"]
    assert last["cpu:0 busy"] >= 0.4
    for c in range(6):
        values = [value for _, channel, value in readings if channel == c]
        assert values == sorted(values), names[c]


def test_before_there_is_a_program_it_has_used_nothing(fake: FakeProc):
    activity = Activity(ONE_SOCKET, fake.root, clock=fake.clock())
    fake.move(1.0, idle=[0, 0, 0, 0])
    assert {channel: value for _, channel, value in activity.read() if channel == 1} == {1: 0.0}
    assert activity.program_pids == frozenset()
    activity.close()


@pytest.mark.parametrize("text", [None, "", "cpu\n", "nonsense\n", "cpu a b c d e f g h\n"])
def test_a_stat_that_cannot_be_read_is_absent_with_a_reason(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / "stat").write_text(text)
    activity, absent = open_activity(ONE_SOCKET, tmp_path, 4_000_000)
    assert activity is None
    assert absent[0].channel == "cpu busy"
    assert "SMARAGDINE_PROC_ROOT" in absent[0].remedy


def test_a_cpu_without_a_line_in_stat_is_not_busy(fake: FakeProc):
    offline = CpuInfo("test", {0: (0, 1, 2, 3, 4, 5, 6, 7)}, {0: 8})
    activity = Activity(offline, fake.root, clock=fake.clock())
    fake.move(1.0, idle=[100, 100, 100, 100])
    assert busy(activity)[0] == pytest.approx(0, abs=0.05)
    activity.close()


@pytest.mark.parametrize("cpus", [ONE_SOCKET, TWO_SOCKETS], ids=["one socket", "two sockets"])
def test_a_cpu_that_goes_and_returns_is_not_busy_meanwhile(fake: FakeProc, cpus: CpuInfo):
    """Its line is gone with all its idle time since boot, and may begin anew when it is back."""
    ten_days = 10 * 86400 * 100
    fake.idle = [ten_days] * 4
    fake.write()
    activity = Activity(cpus, fake.root, clock=fake.clock())

    def busy_s(seconds: float, idle: list[int]) -> float:
        fake.move(seconds, idle)
        return sum(busy(activity).values())

    assert busy_s(1.0, [50, 50, 50, 50]) == 2.0
    fake.offline = {1}
    assert busy_s(1.0, [50, 0, 50, 50]) == 3.5
    assert busy_s(1.0, [50, 0, 50, 50]) == 5.0
    fake.offline = set()
    fake.idle[1] = 7
    assert busy_s(1.0, [50, 0, 50, 50]) == 6.5
    assert busy_s(1.0, [50, 50, 50, 50]) == 8.5
    activity.close()


@pytest.mark.parametrize("cpus", [ONE_SOCKET, TWO_SOCKETS], ids=["one socket", "two sockets"])
def test_a_cpu_that_went_and_returned_between_two_reads_begins_anew(fake: FakeProc, cpus: CpuInfo):
    fake.idle = [10 * 86400 * 100] * 4
    fake.write()
    activity = Activity(cpus, fake.root, clock=fake.clock())
    fake.move(1.0, idle=[50, 50, 50, 50])
    fake.idle[1] = 7
    fake.write()
    assert sum(busy(activity).values()) == 1.5
    fake.move(1.0, idle=[50, 50, 50, 50])
    assert sum(busy(activity).values()) == 3.5
    activity.close()
