"""Files from elsewhere and damaged recordings: an answer or one line, no traceback, no other figure unsaid.

Seeded: `make test` takes the same files every time, `make search` new ones. What one of them finds becomes an
example of its own in the tests of that reader.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import foreign_files
import recordings
import search
import spoilt
from smaragdine.accounting.run import Run
from smaragdine.accounting.summary import to_json
from smaragdine.api import summarise
from smaragdine.errors import UserError, visible
from smaragdine.recording.format import TABLES
from smaragdine.recording.reader import Recording, open_recording

READERS = {reader.name: reader for reader in foreign_files.readers()}
EACH = 340  # spoilt files of a reader, times how often it is worth it
FLIPS = 2_000  # turned bits in the tables of a recording
OLD = 160  # in one without checksums, where nobody notices and all is worked out
INFO = 1_200  # spoilt run.json
LEAST = 20_000  # in all
MOST_MIB = 500.0  # more than before, at the peak

counted: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def count_and_memory() -> Iterator[None]:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = _peak_mib()
    yield
    more = _peak_mib() - before
    print(
        f"\n{sum(counted.values()):,} files were read, with {more:.0f} MiB more at the peak: {dict(counted)}"
    )
    assert more < MOST_MIB


def _peak_mib() -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def tried(kind: str, read: Callable[[], Any], data: bytes, about: object) -> Any:
    """What was read, or None where it was refused in one line. Anything else ends the test with the bytes."""
    counted[kind] += 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return read()
    except UserError as error:
        line = str(error)
        assert visible(line) == line, (about, line)
        assert len(line) < 2000, (about, line[:500])
        return None
    except Exception as error:
        error.add_note(f"{about}: {data[:1500]!r}")
        raise


# Readers of foreign files


@pytest.mark.parametrize("name", READERS)
def test_a_spoilt_file_is_read_or_refused_in_one_line(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    reader = READERS[name]
    assert all(each is not None for each in foreign_files.sound(reader, tmp_path))
    dice = random.Random(f"{search.seed(1)} {name}")
    path = tmp_path / reader.file
    for data in spoilt.spoilt(dice, reader.whole, EACH * reader.often):
        path.write_bytes(data)
        tried(name, lambda: reader.read(path), data, name)
    said = capfd.readouterr()
    assert "Traceback" not in said.err, said.err  # a library's own complaint


# Recordings


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recordings.whole(tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture(scope="module")
def known(whole: Path) -> str:
    """The figures of the whole recording."""
    return figures(open_recording(whole))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def figures(recording: Recording) -> str:
    """All that is shown of it, but for what is said about it."""
    found = Run(recording)
    values = {"summary": to_json(found.summary), "overview": found.to_json()}
    return json.dumps(_without_words(values), sort_keys=True, allow_nan=False)


def _without_words(values: Any) -> Any:
    if isinstance(values, dict):
        words = ("problems", "remarks", "notes", "why", "absent")
        return {key: _without_words(value) for key, value in values.items() if key not in words}
    return [_without_words(value) for value in values] if isinstance(values, list) else values


def summed(recording: Recording) -> str:
    return json.dumps(to_json(summarise(recording)), allow_nan=False)


def messages(data: bytes) -> list[int]:
    """Where each message of an Arrow stream ends."""
    source = pa.BufferReader(data)
    ends: list[int] = []
    while source.tell() < len(data) - 8:
        pa.ipc.read_message(source)
        ends.append(source.tell())
    return [*ends, len(data)]


@pytest.mark.parametrize("table", TABLES)
def test_a_table_cut_at_any_message_or_within_one_is_said(copy: Path, known: str, table: str) -> None:
    path = copy / f"{table}.arrows"
    data = path.read_bytes()
    ends = messages(data)
    assert len(ends) >= 4
    cuts = sorted(
        {0, *ends[:-1], *((a + b) // 2 for a, b in zip([0, *ends], ends, strict=False)), len(data) - 1}
    )
    for at in cuts:
        path.write_bytes(data[:at])
        recording = open_recording(copy)
        assert any(line.startswith(f"{table}.arrows is damaged: ") for line in recording.damage), at
        shown = tried("cut", lambda recording=recording: figures(recording), data[:at], (table, at))
        if shown is not None and shown != known:
            assert all(line in summarise(recording).problems for line in recording.damage)


def test_a_turned_bit_is_said_and_nothing_read_is_another(copy: Path, whole: Path) -> None:
    dice = random.Random(search.seed(2))
    rows = {table: set(_rows(open_recording(whole), table)) for table in TABLES}
    data = {table: (whole / f"{table}.arrows").read_bytes() for table in TABLES}
    bits = dice.choices(TABLES, [len(data[table]) + 2000 for table in TABLES], k=FLIPS)
    for number, table in enumerate(bits):
        changed = bytearray(data[table])
        at = dice.randrange(len(changed))
        changed[at] ^= 1 << dice.randrange(8)
        path = copy / f"{table}.arrows"
        path.write_bytes(changed)
        recording = open_recording(copy)
        assert any(f"{table}.arrows" in line for line in recording.damage), (table, at)
        about = (table, at, changed[at])
        # Figures follow from the tables: what is left of them is as it was.
        left = tried("bit", lambda r=recording, t=table: _rows(r, t), bytes(changed), about)
        assert left is None or rows[table].issuperset(left), about
        if number % 10 == 0:
            tried("shown", lambda r=recording: summed(r), bytes(changed), about)
        if number % 40 == 0:
            tried("shown", lambda r=recording: figures(r), bytes(changed), about)
        path.write_bytes(data[table])
    assert open_recording(copy).damage == []


def _rows(recording: Recording, table: str) -> list[str]:
    return list(map(repr, recording.table(table).to_pylist()))


def without_seals(folder: Path) -> None:
    """As versions wrote it that knew no checksums."""
    for path in folder.glob("*.arrows"):
        stream = pa.ipc.open_stream(path.read_bytes())
        batches = [batch for batch in stream if batch.num_rows]
        with pa.ipc.new_stream(out := io.BytesIO(), stream.schema) as written:
            for batch in batches:
                written.write_batch(batch)
        path.write_bytes(out.getvalue())
    info = json.loads((folder / "run.json").read_text())
    del info["crc32"], info["rows"]
    (folder / "run.json").write_text(json.dumps(info, indent=1))


def test_an_old_recording_with_turned_bits_is_shown_or_refused(copy: Path, known: str) -> None:
    without_seals(copy)
    assert figures(open_recording(copy)) == known
    dice = random.Random(search.seed(3))
    data = {table: (copy / f"{table}.arrows").read_bytes() for table in TABLES}
    for number in range(OLD):
        table = dice.choice(TABLES)
        (changed,) = (
            spoilt.spoilt(dice, [data[table]], 1) if number % 4 == 0 else (_flipped(dice, data[table]),)
        )
        path = copy / f"{table}.arrows"
        path.write_bytes(changed)
        shown = tried("old", lambda: figures(open_recording(copy)), changed, table)
        if shown is not None and shown != known:
            assert any(table in line for line in open_recording(copy).damage), table
        path.write_bytes(data[table])


def _flipped(dice: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_spoilt_run_json_is_said_or_refused(copy: Path, known: str, sealed: bool) -> None:
    """Without its checksum it was written by hand: figures are what it says they are."""
    dice = random.Random(search.seed(4 + sealed))
    path = copy / "run.json"
    data = path.read_bytes()
    if not sealed:
        data = re.sub(rb',\s*"crc32".*', b"\n}", data, flags=re.DOTALL)
        path.write_bytes(data)
        assert figures(open_recording(copy)) == known
    for number, changed in enumerate(spoilt.spoilt(dice, [data], INFO // 2)):
        path.write_bytes(changed)
        recording = tried("run.json", lambda: open_recording(copy), changed, "run.json")
        if recording is None:
            continue
        if sealed and changed != data:
            assert json.loads(changed) == json.loads(data) or any(
                "run.json" in line for line in recording.damage
            )
        if number % 4 == 0:
            tried("run.json shown", lambda r=recording: summed(r), changed, "run.json")
        if number % 24 == 0:
            tried("run.json shown", lambda r=recording: figures(r), changed, "run.json")


def test_there_are_as_many_as_promised() -> None:
    files = sum(EACH * reader.often for reader in READERS.values())
    assert files + FLIPS + INFO + OLD >= LEAST
    assert FLIPS >= 2_000
