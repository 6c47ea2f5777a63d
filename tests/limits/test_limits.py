"""Limits are set only after the previous value is safe, and come back however anybody dies.

What is set is read from the simulated GPUs' own record, outside the process that sets it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cli import TIMEOUT_S
from nvml_fake import (
    GpuSpec,
    in_process,
    nvml_environment,
    set_from_outside,
    settings_made,
    settings_now,
    write_spec,
)
from smaragdine.daemon.lease_calls import AsyncLeases
from smaragdine.limits import journal as journals
from smaragdine.limits import keeper as keepers
from smaragdine.limits.journal import JournalEntry
from smaragdine.limits.keeper import Keeper
from smaragdine.limits.keeper_client import KeeperClient, keeper_command, launch_here, own_keeper
from smaragdine.limits.nvml import Kind, LimitError, LimitValue
from smaragdine.system import boot_id

GPU = GpuSpec()  # 100 to 700 W, 700 by default; graphics 1980·n/8 MHz, memory 3201 and 1600 MHz
DEFAULT_MW = 700_000
LIMIT, LOCKED, LOCKED_MEMORY, APPLICATION = "l", "c", "m", "a"
ROUNDS = 40


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs for this process's children; the file that describes them."""
    for name, value in nvml_environment(tmp_path, [GPU, GPU]).items():
        monkeypatch.setenv(name, value)
    return Path(os.environ["FAKE_NVML"])


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "limits" / "journal"


class Desktop:
    """A keeper in this process, with what it said."""

    def __init__(self, journal: Path) -> None:
        journal.parent.mkdir(exist_ok=True)
        self.journal = journal
        self.notes: list[str] = []
        self.keeper = Keeper(journal, self.notes.append)
        self.keeper.open()
        self.keeper.start()

    def set(self, device: str, kind: Kind, value: float, low: float = 0.0) -> JournalEntry:
        return self.keeper.set(device, kind, LimitValue(value, low))

    def successor(self) -> Desktop:
        """Another one on the same journal; of this one only what is on disk is left, as after a SIGKILL."""
        self.keeper.let_go()
        return Desktop(self.journal)

    def refused(self, device: str, kind: Kind, value: float, low: float = 0.0) -> tuple[str, str]:
        with pytest.raises(LimitError) as raised:
            self.set(device, kind, value, low)
        return raised.value.code, str(raised.value)


@pytest.fixture
def here(spec: Path, tmp_path: Path, journal: Path) -> Iterator[Desktop]:
    with in_process(tmp_path):
        yield Desktop(journal)


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.005)


def test_ranges(here: Desktop) -> None:
    power, graphics, memory, application = [r for r in here.keeper.ranges() if r["device"] == "gpu:1"]
    assert (power["lowest"], power["highest"], power["current"], power["default"]) == (
        100,
        700,
        (700, 0),
        (700, 0),
    )
    assert graphics["steps"] == (247, 495, 742, 990, 1237, 1485, 1732, 1980)
    assert memory["steps"] == application["low_steps"] == (1600, 3201)
    assert application["current"] == (1980, 3201)
    assert graphics["current"] is None


def test_every_kind_is_set_and_brought_back(here: Desktop, spec: Path, journal: Path) -> None:
    assert here.set("gpu:0", "power", 312.5).previous == (700, 0)
    assert here.set("gpu:1", "application_clocks", 990, 1600).previous == (1980, 3201)
    assert here.set("gpu:0", "graphics_clock", 1237, 495).previous is None
    assert here.set("gpu:0", "memory_clock", 1600).previous is None
    assert settings_now(spec) == {
        (0, LIMIT): 312_500,
        (1, APPLICATION): 1600_000_990,
        (0, LOCKED): 495_001_237,
        (0, LOCKED_MEMORY): 1600_001_600,
    }
    assert len(journals.load(journal).entries) == 4
    assert {b.state for b in here.keeper.restore_all()} == {"restored"}
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW}
    # Latest first.
    assert [(gpu, what) for gpu, what, _ in settings_made(spec)[4:]] == [
        (0, LOCKED_MEMORY),
        (0, LOCKED),
        (1, APPLICATION),
        (0, LIMIT),
    ]
    assert not journal.exists()


@pytest.mark.parametrize(
    ("kind", "value", "low", "names"),
    [
        ("power", 99.9, 0, "Allowed: 100 to 700 W"),
        ("power", 701, 0, "Allowed: 100 to 700 W"),
        ("power", float("nan"), 0, "not a number"),
        ("power", float("inf"), 0, "not a number"),
        ("power", -300, 0, "not a number"),
        ("power", 300, 100, "no lowest value"),
        ("graphics_clock", 1000, 0, "Nearest: 990 and 1237 MHz; allowed: 247 to 1980 MHz"),
        ("graphics_clock", 5000, 0, "Nearest: 1980 MHz"),
        ("graphics_clock", 990, 1237, "the lowest (1237 MHz) is above the highest (990 MHz)"),
        ("memory_clock", 1, 0, "Nearest: 1600 MHz"),
        ("application_clocks", 1980, 1600, "Nearest: 990 MHz; allowed: 247 to 990 MHz"),
        ("application_clocks", 1980, 0, "memory clock of 0 MHz"),
    ],
)
def test_outside_the_range_is_refused_with_what_is_allowed(
    here: Desktop, spec: Path, journal: Path, kind: Kind, value: float, low: float, names: str
) -> None:
    code, line = here.refused("gpu:0", kind, value, low)
    assert code == "invalid"
    assert names in line
    assert settings_made(spec) == []
    assert not journal.exists()


def test_what_was_before_the_first_change_comes_back(here: Desktop, spec: Path) -> None:
    set_from_outside(spec, 0, LIMIT, 650_000)
    set_from_outside(spec, 0, APPLICATION, 3201_001_485)
    for watts in (300, 200, 100):
        assert here.set("gpu:0", "power", watts).previous == (650, 0)
    assert here.set("gpu:0", "application_clocks", 990, 1600).previous == (1485, 3201)
    here.keeper.restore_all()
    assert settings_now(spec) == {(0, LIMIT): 650_000, (0, APPLICATION): 3201_001_485}


def test_what_somebody_else_set_meanwhile_is_left(here: Desktop, spec: Path, journal: Path) -> None:
    here.set("gpu:0", "power", 300)
    set_from_outside(spec, 0, LIMIT, 450_000)
    brought = here.keeper.restore("gpu:0", "power")
    assert (brought.state, brought.now) == ("left", (450, 0))
    assert "left at 450 W: somebody else" in here.notes[-1]
    assert settings_now(spec) == {(0, LIMIT): 450_000}
    assert not journal.exists()


def test_a_board_that_rounds_gets_its_value_back(here: Desktop, spec: Path) -> None:
    write_spec(spec, [replace(GPU, limit_step_w=25)])
    assert here.set("gpu:0", "power", 310).target == (300, 0)
    assert here.keeper.restore("gpu:0", "power").state == "restored"
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW}


@pytest.mark.parametrize("confirmed", [True, False])
def test_killed_between_writing_down_and_setting(
    here: Desktop, spec: Path, journal: Path, confirmed: bool
) -> None:
    """A value that is neither the old nor the new one is ours only while it was not confirmed."""
    entry = here.set("gpu:0", "power", 310)
    set_from_outside(spec, 0, LIMIT, 305_000)
    journals.save(journal, [replace(entry, confirmed=confirmed)])
    here.successor()
    assert settings_now(spec) == {(0, LIMIT): 305_000 if confirmed else DEFAULT_MW}


@pytest.mark.parametrize("kind", ["power", "graphics_clock"])
def test_without_permission_nothing_is_owed(here: Desktop, spec: Path, journal: Path, kind: Kind) -> None:
    write_spec(spec, [replace(GPU, set_permission=False)])
    code, line = here.refused("gpu:0", kind, 495)
    assert code == "denied"
    assert "CAP_SYS_ADMIN" in line
    assert not journal.exists()
    assert not here.keeper.pending


def test_what_a_gpu_does_not_have(here: Desktop, spec: Path) -> None:
    write_spec(
        spec, [replace(GPU, application_clocks=False, locked_clocks=False, mig=True, mig_uuids=("MIG-0",))]
    )
    here.keeper.open()
    assert here.refused("gpu:0", "application_clocks", 990, 1600) == (
        "unsupported",
        "gpu:0 application clocks not set: this GPU or its driver has no such limit (MIG is on). "
        "Locked clocks do the same on newer GPUs",
    )
    assert here.refused("gpu:0", "graphics_clock", 990)[0] == "unsupported"
    assert here.refused("gpu:2", "power", 300) == (
        "not_found",
        "no device gpu:2 whose limits can be set: there is gpu:0",
    )
    assert here.refused("cpu:0", "power", 300)[0] == "not_found"


def test_a_gpu_lost_in_the_middle_gets_its_value_back_when_it_returns(
    here: Desktop, spec: Path, journal: Path
) -> None:
    here.set("gpu:0", "power", 300)
    here.set("gpu:1", "power", 400)
    write_spec(spec, [replace(GPU, lost=True), GPU])
    assert [b.state for b in here.keeper.restore_all()] == ["restored", "pending"]
    here.keeper.try_again()
    assert [entry.device for entry in journals.load(journal).entries] == ["gpu:0"]
    assert here.refused("gpu:0", "power", 200)[0] == "unavailable"
    write_spec(spec, [GPU, GPU])
    here.keeper.try_again()
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW, (1, LIMIT): DEFAULT_MW}
    assert here.notes[-1] == "gpu:0 power limit is 700 W again"
    assert not here.keeper.pending


def test_nvml_is_kept_open_while_a_limit_on_a_working_gpu_is_held(
    here: Desktop, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without persistence mode the driver forgets its limits when the last user of a GPU lets go."""
    here.set("gpu:0", "power", 300)
    here.set("gpu:1", "power", 400)
    write_spec(spec, [replace(GPU, lost=True), GPU])
    monkeypatch.setattr(keepers, "release_library", lambda: pytest.fail("NVML was let go of"))
    assert here.keeper.restore("gpu:0", "power").state == "pending"
    here.keeper.try_again()
    write_spec(spec, [GPU, GPU])
    here.keeper.try_again()
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW, (1, LIMIT): 400_000}


def test_a_driver_loaded_anew_is_found_again(here: Desktop, spec: Path) -> None:
    here.set("gpu:0", "power", 300)
    write_spec(spec, [GPU, GPU], init_error=9, driver_load=1)
    assert here.keeper.restore("gpu:0", "power").state == "pending"
    here.keeper.try_again()
    assert here.refused("gpu:0", "power", 200)[0] == "not_found"
    assert here.keeper.ranges() == []
    # Numbers may change with it; limits follow the GPU.
    first, second = GPU.at(0), GPU.at(1)
    write_spec(spec, [second, first], driver_load=1)
    set_from_outside(spec, 1, LIMIT, 300_000)
    here.keeper.try_again()
    assert settings_now(spec)[(1, LIMIT)] == DEFAULT_MW
    assert here.set("gpu:0", "power", 200).uuid == second.uuid
    assert {found["device"] for found in here.keeper.ranges()} == {"gpu:0", "gpu:1"}


def test_a_set_that_fails_once(here: Desktop, spec: Path, journal: Path) -> None:
    write_spec(spec, [replace(GPU, set_error=10, set_failures=1)])
    assert here.refused("gpu:0", "graphics_clock", 990)[0] == "unavailable"
    assert settings_now(spec) == {}
    assert not journal.exists()
    here.set("gpu:0", "graphics_clock", 990)
    write_spec(spec, [replace(GPU, set_error=10, set_failures=1)])
    assert here.refused("gpu:0", "graphics_clock", 1237)[0] == "unavailable"
    assert len(journals.load(journal).entries) == 1
    here.keeper.restore_all()
    assert settings_now(spec) == {}


def test_a_full_disk_refuses_to_set_and_does_not_keep_from_bringing_back(
    here: Desktop, spec: Path, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.set("gpu:0", "power", 300)
    before = journal.read_bytes()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(journals.os, "fsync", full)
        for device in ("gpu:0", "gpu:1"):
            code, line = here.refused(device, "power", 200)
            assert code == "unavailable"
            assert "No space left" in line
        assert journal.read_bytes() == before
        assert settings_now(spec) == {(0, LIMIT): 300_000}
        here.keeper.restore_all()
        assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW}
        assert "could not be written (No space left" in here.notes[-1]


def entries() -> list[JournalEntry]:
    return [
        JournalEntry("gpu:0", "GPU-0", "power", LimitValue(700.0), LimitValue(300.0), True),
        JournalEntry("gpu:0", "GPU-0", "graphics_clock", None, LimitValue(990.0, 247.0), False),
        JournalEntry(
            "gpu:1",
            "GPU-1",
            "application_clocks",
            LimitValue(1980.0, 3201.0),
            LimitValue(990.0, 1600.0),
            True,
        ),
    ]


def test_a_journal_torn_at_any_byte_gives_its_whole_lines_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journals.save(path, entries())
    whole = path.read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        loaded = journals.load(path)
        lines = sum(end <= cut for end in ends)
        assert loaded.entries == tuple(entries()[: max(lines - 1, 0)])
        assert "damaged" in loaded.trouble
    path.write_bytes(whole)
    assert journals.load(path) == journals.Loaded(tuple(entries()))


def test_a_gpu_whose_limits_another_keeper_has_changed_is_held(
    here: Desktop, spec: Path, journal: Path
) -> None:
    other = Desktop(journal.with_name("journal-gpu0"))
    here.set("gpu:0", "power", 300)
    assert other.refused("gpu:0", "graphics_clock", 990)[0] == "held"
    assert other.refused("gpu:0", "power", 250)[0] == "held"
    assert here.refused("gpu:1", "power", 9_999)[0] == "invalid"
    other.set("gpu:1", "power", 400)
    assert here.refused("gpu:1", "power", 200)[0] == "held"
    here.keeper.restore_all()
    other.set("gpu:0", "power", 250)
    other.keeper.restore_all()
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW, (1, LIMIT): DEFAULT_MW}
    here.set("gpu:1", "power", 200)


def test_what_a_keeper_left_comes_back_after_another_ones(here: Desktop, spec: Path, journal: Path) -> None:
    """The other one takes 300 W for what was before: it must be gone before 700 W are brought back."""
    here.set("gpu:0", "power", 300)
    here.keeper.let_go()  # killed
    other = Desktop(journal.with_name("journal-gpu0"))
    other.set("gpu:0", "power", 250)
    again = here.successor()
    assert again.keeper.pending
    assert again.refused("gpu:0", "power", 200)[0] == "held"
    assert settings_now(spec) == {(0, LIMIT): 250_000}
    other.keeper.restore_all()
    again.keeper.try_again()
    assert not again.keeper.pending
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW}
    assert not journal.exists()
    again.set("gpu:0", "power", 200)


def test_a_lock_that_cannot_be_made_keeps_from_setting_alone(
    here: Desktop, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> journals.Lock:
        raise OSError(errno.ENOSPC, "No space left on device")

    here.set("gpu:0", "power", 300)
    monkeypatch.setattr(journals, "Lock", fails)
    code, line = here.refused("gpu:1", "power", 200)
    assert code == "unavailable"
    assert "No space left" in line
    here.successor()
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW}


def test_a_damaged_journal_is_kept_aside(here: Desktop, spec: Path, journal: Path) -> None:
    here.set("gpu:0", "power", 300)
    here.set("gpu:1", "power", 400)
    torn = journal.read_bytes()[:-3]
    journal.write_bytes(torn)
    again = here.successor()
    assert "only 1 of 2" in again.notes[0]
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW, (1, LIMIT): 400_000}
    assert Path(f"{journal}.damaged").read_bytes() == torn


@pytest.mark.parametrize("kind", ["of another version", "for a moment"])
def test_a_journal_that_cannot_be_read_now_is_not_replaced(
    here: Desktop, spec: Path, journal: Path, kind: str
) -> None:
    here.set("gpu:0", "power", 300)
    mine = journal.read_bytes()
    if kind == "for a moment":
        journal.rename(journal.with_name("away"))
        journal.mkdir()  # read_bytes is an error
    else:
        line = journals.encode([], boot_id()).partition(b" ")[2].replace(b'"limits":1', b'"limits":2')
        journal.write_bytes(b"%08x %s" % (zlib.crc32(line[:-1]), line))
    theirs = journal.read_bytes() if journal.is_file() else b""
    again = here.successor()
    code, why = again.refused("gpu:1", "power", 200)
    assert code == "unavailable"
    assert str(journal) in why
    assert settings_now(spec) == {(0, LIMIT): 300_000}
    if kind == "for a moment":
        journal.rmdir()
    else:
        assert journal.read_bytes() == theirs
    journal.write_bytes(mine)
    again.set("gpu:1", "power", 200)
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW, (1, LIMIT): 200_000}


def test_no_changed_byte_brings_a_wrong_value_back(tmp_path: Path) -> None:
    whole = journals.encode(entries(), "boot")
    for n in range(len(whole)):
        changed = whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :]
        assert set(journals.decode(changed)[0]) < set(entries()) or n < whole.index(b"\n") + 1


def test_another_boot_owes_nothing(here: Desktop, spec: Path, journal: Path) -> None:
    here.set("gpu:0", "power", 300)
    journals.save(journal, journals.load(journal).entries, boot="another")
    again = here.successor()
    assert settings_now(spec) == {(0, LIMIT): 300_000}
    assert "started anew" in again.notes[0]
    assert not journal.exists()


# With the keeper as a process of its own.


def run_keeper(journal: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A keeper whose parent is gone already: it brings back and ends."""
    command = [*keeper_command(journal), *options]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def nothing_changed(spec: Path) -> bool:
    return settings_now(spec).items() <= {(0, LIMIT): DEFAULT_MW, (1, LIMIT): DEFAULT_MW}.items()


def change_something(client: KeeperClient, rng: random.Random) -> None:
    device = rng.choice(["gpu:0", "gpu:1"])
    what = rng.randrange(5)
    if what == 0:
        client.restore(device, "power")
    elif what == 1:
        client.set(device, "graphics_clock", rng.choice([495, 990, 1980]))
    elif what == 2:
        client.set(device, "application_clocks", 990, rng.choice([1600, 3201]))
    else:
        client.set(device, "power", rng.randrange(100, 700))


def change_until_refused(client: KeeperClient, rng: random.Random) -> str:
    while True:
        try:
            change_something(client, rng)
        except LimitError as error:
            return error.code


def start_parent(journal: Path, seed: int, *, forks: bool = False) -> tuple[int, int, int]:
    """A process that changes limits without end: its pid, its keeper's, and that of a child it forked."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(receive)
            rng = random.Random(seed)
            with own_keeper(journal) as client:
                change_something(client, rng)
                child = os.fork() if forks else 0
                if forks and child == 0:
                    time.sleep(10 * TIMEOUT_S)
                    os._exit(0)
                os.write(send, f"{client.pid} {child}\n".encode())
                while True:
                    change_something(client, rng)
        finally:
            os._exit(1)
    os.close(send)
    with open(receive) as pipe:
        keeper, child = map(int, pipe.readline().split())
    return pid, keeper, child


def wait_for_keepers_end(journal: Path) -> None:
    lock = journals.Lock(journal)
    assert lock.take(TIMEOUT_S)
    lock.close()


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_kill_9_of_the_parent_brings_everything_back(spec: Path, journal: Path) -> None:
    rng = random.Random(1)
    for seed in range(ROUNDS):
        Path(f"{spec}.state").unlink(missing_ok=True)
        parent, _, _ = start_parent(journal, seed)
        time.sleep(rng.uniform(0, 0.03))
        end(parent)
        wait_for_keepers_end(journal)
        assert nothing_changed(spec), (seed, settings_now(spec))
        assert not journal.exists()


def test_kill_9_of_the_keeper_brings_everything_back_and_says_so(spec: Path, journal: Path) -> None:
    rng = random.Random(2)
    said: list[str] = []
    with own_keeper(journal, say=said.append) as client:
        for seed in range(ROUNDS):
            generation = client.generation
            killing = threading.Timer(rng.uniform(0, 0.02), os.kill, (client.pid, signal.SIGKILL))
            killing.start()
            assert change_until_refused(client, rng) == "unavailable"
            killing.join()
            wait_for(lambda before=generation: client.generation > before)
            client.wait_ready(TIMEOUT_S)
            assert nothing_changed(spec), (seed, settings_now(spec))
            assert not journal.exists()
    assert sum("keeper has died" in line for line in said) == ROUNDS


def test_kill_9_of_both_leaves_it_to_the_next_start(spec: Path, journal: Path) -> None:
    rng = random.Random(3)
    for seed in range(ROUNDS // 4):
        parent, keeper, _ = start_parent(journal, seed)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(parent, signal.SIGSTOP)  # so that it starts no other
        os.kill(keeper, signal.SIGKILL)
        end(parent)
        assert run_keeper(journal).returncode == 0
        assert nothing_changed(spec), (seed, settings_now(spec))
        assert not journal.exists()


def test_a_forked_child_that_holds_the_pipe_does_not_hide_the_parents_end(spec: Path, journal: Path) -> None:
    parent, _, child = start_parent(journal, 5, forks=True)
    try:
        end(parent)
        wait_for_keepers_end(journal)
        assert nothing_changed(spec)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_terminals_signals_pass_by_and_sigterm_brings_back(spec: Path, journal: Path) -> None:
    client = KeeperClient(launch_here(journal))
    client.wait_ready(TIMEOUT_S)
    client.set("gpu:0", "power", 300)
    keeper = client.pid
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        os.kill(keeper, ignored)
    assert client.set("gpu:0", "power", 250).previous == (700, 0)
    os.kill(keeper, signal.SIGTERM)
    wait_for(lambda: client.generation == 1)
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW}
    client.close()


def test_least_privilege(spec: Path, journal: Path) -> None:
    with own_keeper(journal) as client:
        status = Path(f"/proc/{client.pid}/status").read_text()
        if os.geteuid() != 0:
            pytest.skip("needs root")
        fields = dict(line.split(":\t", 1) for line in status.splitlines())
        sys_admin = 1 << 21
        assert int(fields["CapEff"], 16) & ~sys_admin == 0
        assert int(fields["CapBnd"], 16) & ~sys_admin == 0
        assert fields["NoNewPrivs"] == "1"
        assert client.privilege == "root, with no capability but CAP_SYS_ADMIN"


def test_one_keeper_per_journal(spec: Path, journal: Path) -> None:
    with own_keeper(journal) as client:
        client.set("gpu:0", "power", 300)
        second = run_keeper(journal, "--lock-wait-s", "0")
        assert second.returncode == 3
        assert "another process holds the limits" in second.stdout
        assert settings_now(spec) == {(0, LIMIT): 300_000}


def test_a_journal_that_cannot_be_made_is_said(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(LimitError, match="no limit will be set"),
        own_keeper(tmp_path / "file" / "journal"),
    ):
        pass


def test_a_gpu_lost_at_the_end_is_waited_for(spec: Path, journal: Path) -> None:
    said: list[str] = []
    with own_keeper(journal, say=said.append) as client:
        client.set("gpu:0", "power", 300)
        write_spec(spec, [replace(GPU, lost=True), GPU])
        with pytest.raises(LimitError, match="does not answer"):
            client.set("gpu:0", "power", 200)
        assert client.restore("gpu:0", "power").state == "pending"
        write_spec(spec, [replace(GPU, lost=True), GPU])
    assert any("comes back as soon as" in line for line in said)
    # Nobody is there any more but the keeper.
    write_spec(spec, [GPU, GPU])
    wait_for(lambda: not journal.exists())
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW}


def test_given_up_stays_in_the_journal(spec: Path, journal: Path) -> None:
    with own_keeper(journal) as client:
        client.set("gpu:0", "power", 300)
        kept = journal.read_bytes()
    journal.write_bytes(kept)
    set_from_outside(spec, 0, LIMIT, 300_000)
    write_spec(spec, [replace(GPU, lost=True)])
    given_up = run_keeper(journal, "--give-up-s", "0")
    assert given_up.returncode == 1
    assert "gpu:0 power limit" in given_up.stderr
    assert len(journals.load(journal).entries) == 1
    write_spec(spec, [GPU])
    assert run_keeper(journal).returncode == 0
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW}


def test_a_driver_that_hangs_holds_nobody_up_and_the_set_is_taken_back(spec: Path, journal: Path) -> None:
    client = KeeperClient(launch_here(journal), timeout_s=TIMEOUT_S)
    client.wait_ready(TIMEOUT_S)
    write_spec(spec, [replace(GPU, set_hang_ms=600_000), GPU])
    client._timeout_s = 0.1
    with pytest.raises(LimitError, match="has not answered for"):
        client.set("gpu:0", "power", 300)
    with pytest.raises(LimitError, match="has not answered an earlier request yet"):
        client.set("gpu:1", "power", 300)
    write_spec(spec, [GPU, GPU])
    wait_for(lambda: settings_made(spec) == [(0, LIMIT, 300_000), (0, LIMIT, DEFAULT_MW)])
    client._timeout_s = TIMEOUT_S
    wait_for(lambda: not client._late)
    assert client.set("gpu:1", "power", 300).previous == (700, 0)
    client.close(TIMEOUT_S)
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW, (1, LIMIT): DEFAULT_MW}


def test_garbage_does_not_stop_the_keeper(spec: Path, journal: Path) -> None:
    lines = [b"", b"{", b"[]", b"1", b'{"id":1}', b'{"id":2,"do":"set"}', b"\xff\xfe"]
    lines.append(b'{"id":3,"do":"set","device":"gpu:0","kind":"fan","value":1}')
    lines.append(b'{"id":4,"do":"set","device":"gpu:0","kind":"power","value":"x"}')
    lines.append(b'{"id":5,"do":"set","device":"gpu:0","kind":"power","value":1e999}')
    lines.append(b'{"id":6,"do":"set","device":"gpu:0","kind":"power","value":300}')
    data = b"\n".join(lines) + b"\n"
    done = subprocess.run(keeper_command(journal), input=data, capture_output=True, timeout=TIMEOUT_S)
    answers = done.stdout.decode().splitlines()[1:]
    assert len(answers) == len(lines)
    assert all('"code":"invalid"' in answer for answer in answers[:-1])
    assert answers[-1] == '{"id":6,"result":{"previous":[700.0,0.0],"actual":[300.0,0.0]}}'
    assert done.returncode == 0
    assert settings_now(spec) == {(0, LIMIT): DEFAULT_MW}


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_request_that_is_too_long_ends_the_keeper_which_brings_back(
    spec: Path, journal: Path, end: bytes
) -> None:
    request = b'{"id":1,"do":"set","device":"gpu:0","kind":"power","value":300}\n'
    later = request.replace(b"300", b"200")
    data = request + b'{"id":2,"do":"' + b"x" * 70_000 + end + later
    done = subprocess.run(keeper_command(journal), input=data, capture_output=True, timeout=TIMEOUT_S)
    assert [b'"id":1,"result"' in line for line in done.stdout.splitlines()[1:]] == [True]
    assert done.returncode == 0
    assert settings_made(spec) == [(0, LIMIT, 300_000), (0, LIMIT, DEFAULT_MW)]


def test_no_gpu_at_all(tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in nvml_environment(tmp_path, [], init_error=9).items():
        monkeypatch.setenv(name, value)
    with own_keeper(journal) as client:
        assert client.ranges() == []
        with pytest.raises(LimitError, match="no device gpu:0") as raised:
            client.set("gpu:0", "power", 300)
        assert raised.value.code == "not_found"


def test_leases_are_given_and_taken_back(spec: Path, journal: Path) -> None:
    async def session() -> None:
        leases = AsyncLeases(KeeperClient(launch_here(journal), timeout_s=TIMEOUT_S))
        leases._keeper.wait_ready(TIMEOUT_S)
        keep = asyncio.ensure_future(leases.keep())
        assert len(await leases.ranges()) == 8
        ann = await leases.set_limit("ann", "gpu:0", "power", 300)
        await leases.set_limit("bob", "gpu:1", "power", 300)
        await leases.set_limit("bob", "gpu:1", "graphics_clock", 990, lease_s=0.01)
        assert leases.owners() == {"ann", "bob"}
        while leases.count == 3:
            await asyncio.sleep(0.01)
        assert settings_now(spec) == {(0, LIMIT): 300_000, (1, LIMIT): 300_000}
        assert (await leases.release("ann", ann.lease_id)).now == (700, 0)
        assert settings_now(spec)[(0, LIMIT)] == DEFAULT_MW
        assert len(await leases.owner_gone("bob")) == 1
        assert nothing_changed(spec)
        await leases.set_limit("ann", "gpu:0", "power", 200)
        # While the keeper hangs the loop goes on.
        write_spec(spec, [GPU, replace(GPU, set_hang_ms=600_000)])
        hanging = asyncio.ensure_future(leases.set_limit("bob", "gpu:1", "power", 300))
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert not hanging.done()
        write_spec(spec, [GPU, GPU])
        await hanging
        os.kill(leases._keeper.pid, signal.SIGKILL)
        while leases.count:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(leases._keeper.wait_ready, TIMEOUT_S)
        keep.cancel()
        await leases.close(TIMEOUT_S)

    asyncio.run(session())
    assert nothing_changed(spec)
