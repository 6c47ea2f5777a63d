from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smaragdine.daemon import log as spool
from smaragdine.daemon.log import Batch, Log, decode, encode
from smaragdine.monitor.sampler import Note

SECOND = 1_000_000_000


def batch(seed: int = 0, rows: int = 10, notes: tuple[Note, ...] = ()) -> Batch:
    numbers = np.arange(rows)
    return Batch(
        0,
        (seed * 1000 + numbers).astype(np.int64),
        (numbers % 7).astype(np.uint32),
        np.sqrt(seed + numbers).astype(np.float64),
        notes,
    )


def same(one: Batch | None, other: Batch) -> bool:
    assert one is not None
    columns = ((one.t_ns, other.t_ns), (one.channel, other.channel), (one.value, other.value))
    return one.notes == other.notes and all(np.array_equal(a, b) for a, b in columns)


def everything(log: Log) -> list[int]:
    """All there is, as a reader from the very beginning gets it."""
    found: list[int] = []
    while (read := log.read(found[-1] + 1 if found else 1)) is not None:
        assert same(read, replace(batch(int(read.t_ns[0]) // 1000), notes=read.notes))
        found.append(read.sequence)
    return found


def spool_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("batches-*.spool"))


@given(st.integers(0, 200), st.text(max_size=30), st.integers(1, 2**63))
def test_a_batch_comes_out_of_its_bytes_as_it_went_in(rows: int, text: str, sequence: int):
    notes = (Note(5, "clock_step", text), Note(6, "sensor_lost", "", (3, 4)))
    before = replace(batch(3, rows, notes), sequence=sequence)
    after = decode(b"x" * 7 + encode(before), 7)
    assert same(after, before)
    assert after is not None
    assert after.sequence == sequence


def test_any_harmed_byte_is_noticed():
    data = encode(replace(batch(1, 3, (Note(1, "a", "b"),)), sequence=9))
    for at in range(len(data)):
        harmed = bytes([*data[:at], data[at] ^ 0x40, *data[at + 1 :]])
        assert decode(harmed) is None
        assert decode(data[:at]) is None


@pytest.mark.parametrize("spooled", [False, True])
def test_batches_are_numbered_from_one_on(tmp_path: Path, spooled: bool):
    log = Log(tmp_path / "state" if spooled else None)
    assert (log.first, log.next_sequence, log.read(1), log.kept_batches) == (1, 1, None, 0)
    assert [log.append(batch(i)) for i in range(1, 4)] == [1, 2, 3]
    assert everything(log) == [1, 2, 3]
    assert (log.first, log.next_sequence, log.read(4), log.kept_batches) == (1, 4, None, 3)
    assert log.next_channel == 7


def test_memory_is_bounded_and_a_slow_reader_learns_what_it_lost():
    log = Log(None, memory_bytes=5 * batch().memory_bytes)
    for i in range(1, 101):
        log.append(batch(i))
    assert everything(log) == [96, 97, 98, 99, 100]
    assert log.first == 96
    late = log.read(40)
    assert late is not None
    assert late.sequence - 40 == 56


def test_the_spool_holds_more_than_memory_and_drops_its_oldest_file(tmp_path: Path):
    size = len(encode(batch()))
    log = Log(tmp_path, memory_bytes=batch().memory_bytes, spool_bytes=32 * size)
    for i in range(1, 101):
        log.append(batch(i))
        assert sum(path.stat().st_size for path in spool_files(tmp_path)) <= 32 * size
    kept = everything(log)
    assert kept == list(range(kept[0], 101))
    assert 30 <= len(kept) == log.kept_batches <= 32
    assert log.first == kept[0]


def test_a_restart_goes_on(tmp_path: Path):
    log = Log(tmp_path)
    note = Note(7, "sensor_lost", "gpu:0 power: gone", (2,))
    log.append(batch(1))
    log.append(batch(2, notes=(note,)))
    log.close()
    again = Log(tmp_path)
    assert (again.first, again.next_sequence, again.next_channel) == (1, 3, 7)
    assert again.append(batch(3)) == 3
    assert everything(again) == [1, 2, 3]
    second = again.read(2)
    assert second is not None
    assert second.notes == (note,)


def test_nobody_else_may_read_the_files(tmp_path: Path):
    folder = tmp_path / "state"
    mask = os.umask(0)
    try:
        Log(folder).append(batch(1))
    finally:
        os.umask(mask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("torn_bytes", [1, 100, -30, -1, 0])
def test_a_torn_tail_costs_only_what_is_torn(tmp_path: Path, torn_bytes: int):
    log = Log(tmp_path)
    for i in range(1, 4):
        log.append(batch(i))
    log.close()
    [path] = spool_files(tmp_path)
    whole = path.read_bytes()
    left = len(whole) - torn_bytes if torn_bytes > 0 else len(whole) // 3 * 2 - torn_bytes
    path.write_bytes(whole[:left])
    log = Log(tmp_path)
    # The number of the torn batch may have been seen: it is not given again.
    assert log.append(batch(4)) == 4
    assert everything(log) == [1, 2, 4]
    log.close()
    (tmp_path / "numbers").unlink()
    again = Log(tmp_path)
    assert again.next_sequence == 5
    assert everything(again) == [1, 2, 4]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_harm_in_the_middle_leaves_the_rest(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    folder = tmp_path_factory.mktemp("spool")
    log = Log(folder)
    for i in range(1, 11):
        log.append(batch(i))
    log.close()
    [path] = spool_files(folder)
    content = bytearray(path.read_bytes())
    each = len(content) // 10
    places = data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4))
    for place in places:
        content[place] ^= 0xFF
    harmed = {place // each + 1 for place in set(places) if places.count(place) % 2}
    path.write_bytes(content)
    log = Log(folder)
    assert everything(log) == [i for i in range(1, 11) if i not in harmed]
    assert log.next_sequence == 11
    log.close()


def test_a_file_without_anything_good_is_deleted(tmp_path: Path):
    (tmp_path / f"batches-{1:020}.spool").write_bytes(b"SMB1" * 1000)
    log = Log(tmp_path)
    assert spool_files(tmp_path) == []
    assert log.append(batch(1)) == 1
    assert everything(log) == [1]


def test_what_the_disk_loses_later_is_skipped(tmp_path: Path):
    log = Log(tmp_path, memory_bytes=1)
    for i in range(1, 6):
        log.append(batch(i))
    [path] = spool_files(tmp_path)
    each = path.stat().st_size // 5
    with path.open("r+b") as file:
        file.seek(each + 40)
        file.write(b"\xff" * 8)
    assert everything(log) == [1, 3, 4, 5]


@dataclass
class Disk:
    """Takes writes of spool files, or says why not."""

    error: int | None = None
    partly: bool = False

    def pwrite(self, fd: int, data: bytes, offset: int, usual: Callable[..., int] = os.pwrite) -> int:
        if self.error is None or len(data) < 100:
            return usual(fd, data, offset)
        if self.partly and len(data) > 200:
            return usual(fd, data[:120], offset)
        raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("partly", [False, True])
def test_a_full_disk_leaves_memory_and_the_spool_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partly: bool
):
    disk, now = Disk(), [0]
    monkeypatch.setattr(spool.os, "pwrite", disk.pwrite)
    log = Log(tmp_path, memory_bytes=4 * batch().memory_bytes, mono_ns=lambda: now[0])
    log.append(batch(1))
    disk.error, disk.partly = errno.ENOSPC, partly
    for i in range(2, 9):
        log.append(batch(i))
        now[0] += SECOND // 4
    assert "No space left" in log.trouble
    assert everything(log) == [1, 5, 6, 7, 8]
    disk.error = None
    now[0] += SECOND
    log.append(batch(9))
    assert log.trouble == ""
    log.append(batch(10))
    in_the_log = [note.name for i in everything(log) for note in getattr(log.read(i), "notes", ())]
    assert in_the_log[-1] == "spool_back"
    kept = everything(log)
    log.close()
    monkeypatch.undo()
    again = Log(tmp_path)
    # What memory still held when the disk took writes again is on it too.
    assert everything(again) == kept == [1, 5, 6, 7, 8, 9, 10]
    assert again.next_sequence == 11


def test_numbers_are_not_given_twice_though_the_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk = Disk()
    monkeypatch.setattr(spool.os, "pwrite", disk.pwrite)
    log = Log(tmp_path, mono_ns=lambda: 0)
    log.append(batch(1))
    disk.error = errno.ENOSPC
    for i in range(2, 30):
        log.append(batch(i))
    log.close()
    assert Log(tmp_path).next_sequence == 30


class Killed(BaseException):
    """What nothing in the log catches."""


@pytest.mark.parametrize("part", [0.0, 0.5])
@pytest.mark.parametrize("writes", range(8))
def test_whoever_is_killed_while_it_writes_leaves_no_number_without_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int, part: float
):
    usual, left = os.pwrite, [writes]

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if not left[0]:
            usual(fd, data[: int(len(data) * part)], offset)
            raise Killed
        left[0] -= 1
        return usual(fd, data, offset)

    log = Log(tmp_path)
    log.append(batch(1))
    monkeypatch.setattr(spool.os, "pwrite", pwrite)
    readable = [1]

    def append_until_killed() -> None:
        while True:
            readable.append(log.append(batch(readable[-1] + 1)))

    with pytest.raises(Killed):
        append_until_killed()
    monkeypatch.undo()
    os.close(log._spool._numbers_fd)  # what the kernel does: another may have the folder then
    again = Log(tmp_path)
    after = again.append(batch(50))
    # A batch may be there that nobody could read yet; none that somebody read is gone, or another one now.
    assert everything(again) == list(range(1, after + 1))
    assert len(readable) <= after - 1 <= len(readable) + 1


def test_numbers_do_not_go_back_while_memory_is_spooled_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk, now, kept = Disk(), [0], []
    log = Log(tmp_path, mono_ns=lambda: now[0])
    monkeypatch.setattr(spool.os, "pwrite", disk.pwrite)
    disk.error = errno.ENOSPC
    for i in range(1, 6):
        log.append(batch(i))

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if len(data) < 100:
            kept.append(int.from_bytes(data[:8], "little"))
        return disk.pwrite(fd, data, offset)

    monkeypatch.setattr(spool.os, "pwrite", pwrite)
    disk.error, now[0] = None, 2 * SECOND
    log.append(batch(6))
    assert kept
    assert min(kept) >= 6


def test_a_folder_that_cannot_be_used_is_said_once_and_tried_again(tmp_path: Path):
    now = [0]
    (tmp_path / "state").write_text("a file")
    log = Log(tmp_path / "state", mono_ns=lambda: now[0])
    assert "state" in log.trouble
    for i in range(1, 4):
        log.append(batch(i))
        now[0] += 2 * SECOND
    assert everything(log) == [1, 2, 3]
    notes = [note.name for i in (1, 2, 3) for note in getattr(log.read(i), "notes", ())]
    assert notes == ["spool_lost"]
    (tmp_path / "state").unlink()
    log.append(batch(4))
    log.close()
    assert everything(Log(tmp_path / "state")) == [1, 2, 3, 4]


def test_an_old_spool_that_shows_up_late_does_not_mix_with_what_was_read(tmp_path: Path):
    old = Log(tmp_path / "away")
    for i in range(1, 50):
        old.append(batch(i))
    old.close()
    (tmp_path / "state").write_text("in the way")
    now = [0]
    log = Log(tmp_path / "state", mono_ns=lambda: now[0])
    log.append(batch(1))
    (tmp_path / "state").unlink()
    (tmp_path / "away").rename(tmp_path / "state")
    now[0] += 2 * SECOND
    log.append(batch(2))
    assert everything(log) == [1, 2]


def test_two_daemons_do_not_write_into_one_folder(tmp_path: Path):
    first = Log(tmp_path)
    second = Log(tmp_path)
    assert second.trouble
    assert not first.trouble
    second.append(batch(1))
    first.append(batch(1))
    first.close()
    assert everything(Log(tmp_path)) == [1]
