"""What was changed or lost in a table after it was written is noticed, whatever it was."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import recordings
from smaragdine.errors import UserError
from smaragdine.recording import seal
from smaragdine.recording.asked import asked
from smaragdine.recording.damage import sealed_json, table_files
from smaragdine.recording.folder import write_info
from smaragdine.recording.format import EVENTS, MARKS
from smaragdine.recording.marks import marks_table
from smaragdine.recording.reader import open_recording
from smaragdine.recording.writer import TableWriter, fit

LIKE_A_SEAL = seal.BLANK.decode()


def marks_file(folder: Path, count: int = 4) -> Path:
    writer = TableWriter(folder / "marks.arrows", MARKS)
    for i in range(count):
        writer.write(marks_table([{"t_ns": i, "name": LIKE_A_SEAL, "index": i}]).to_batches()[0])
    writer.close()
    return folder / "marks.arrows"


def events_file(folder: Path) -> Path:
    writer = TableWriter(folder / "events.arrows", EVENTS)
    for names in (["a", "b"], ["a", LIKE_A_SEAL], ["c", "b"]):
        rows = [{"name": n, "device": "gpu:0", "start_ns": 1, "duration_ns": 2} for n in names]
        writer.write(fit(pa.Table.from_pylist(rows), EVENTS, "events").to_batches()[0])
    writer.close()
    return folder / "events.arrows"


def messages(data: bytes) -> Iterator[tuple[int, int]]:
    source = pa.BufferReader(data)
    while source.tell() < len(data) - 8:
        begin = source.tell()
        pa.ipc.read_message(source)
        yield begin, source.tell()


def rows_of(data: bytes) -> list[dict[str, object]]:
    content = pa.py_buffer(data)
    return [row for batch in seal.batches(content, seal.survey(content)) for row in batch.to_pylist()]


@pytest.mark.parametrize("make", [marks_file, events_file])
def test_a_finished_table_is_whole_and_plain_arrow(tmp_path: Path, make) -> None:
    data = make(tmp_path).read_bytes()
    found = seal.survey(pa.py_buffer(data))
    plain = pa.ipc.open_stream(data).read_all()
    assert found.whole
    assert found.sealed
    assert found.rows == plain.num_rows > 0
    assert rows_of(data) == plain.to_pylist()


@pytest.mark.parametrize("make", [marks_file, events_file])
def test_every_flipped_bit_is_noticed_and_no_row_is_another(tmp_path: Path, make) -> None:
    data = make(tmp_path).read_bytes()
    rows = rows_of(data)
    for at in range(0, len(data), 3):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        found = seal.survey(pa.py_buffer(bytes(changed)))
        assert not found.whole, at
        assert all(row in rows for row in rows_of(bytes(changed))), at


@pytest.mark.parametrize("make", [marks_file, events_file])
def test_a_table_cut_between_two_messages_is_not_whole(tmp_path: Path, make) -> None:
    data = make(tmp_path).read_bytes()
    ends = [end for _, end in messages(data)]
    assert len(ends) >= 5
    for end in ends:
        found = seal.survey(pa.py_buffer(data[:end]))
        assert not found.whole
        assert not found.damaged
        assert not found.cut


def test_a_batch_that_is_lost_repeated_or_moved_is_noticed(tmp_path: Path) -> None:
    data = marks_file(tmp_path).read_bytes()
    head, none, *batches = [data[begin:end] for begin, end in messages(data)]
    one, two, three, four = batches
    orders = ([one, three, four], [one, two, two, three, four], [two, one, three, four], [two, three, four])
    for order in orders:
        assert seal.survey(pa.py_buffer(b"".join([head, none, *order]) + data[-8:])).damaged


def test_one_damaged_batch_of_readings_takes_no_other_along(tmp_path: Path) -> None:
    data = bytearray(marks_file(tmp_path).read_bytes())
    begin, end = list(messages(bytes(data)))[3]
    data[(begin + end) // 2 + 100] ^= 1
    assert [row["index"] for row in rows_of(bytes(data))] == [0, 2, 3]


def test_what_a_full_disk_kept_out_leaves_the_rest_sealed(tmp_path: Path, monkeypatch) -> None:
    from smaragdine.recording import writer as module

    real, full = module.os.pwrite, True

    def pwrite(fd: int, data: bytes, at: int) -> int:
        if full and at > 0:
            raise OSError(28, "No space left on device")
        return real(fd, data, at)

    monkeypatch.setattr(module.os, "pwrite", pwrite)
    monkeypatch.setattr(module, "_MOST_PENDING_BYTES", 4000)
    writer = TableWriter(tmp_path / "marks.arrows", MARKS)
    for i in range(20):
        full = i < 15
        writer.write(marks_table([{"t_ns": i, "name": "step_end"}]).to_batches()[0])
    writer.close()
    assert writer.dropped_batches > 0
    found = seal.survey(seal.map_file(tmp_path / "marks.arrows"))
    assert found.whole
    assert found.rows == writer.rows == 20 - writer.dropped_batches


def without_seals(folder: Path) -> None:
    """As versions wrote it that knew no checksums."""
    for path in folder.glob("*.arrows"):
        table = pa.ipc.open_stream(path.read_bytes()).read_all()
        with pa.ipc.new_stream(out := io.BytesIO(), table.schema) as stream:
            stream.write_table(table)
        path.write_bytes(out.getvalue())
    values = json.loads((folder / "run.json").read_text())
    values.pop("crc32")
    (folder / "run.json").write_text(json.dumps(values))


def test_a_recording_without_checksums_is_read_and_said_to_be_unchecked(tmp_path: Path) -> None:
    new = open_recording(recordings.make(tmp_path / "new"))
    shutil.copytree(new.path, tmp_path / "old")
    without_seals(tmp_path / "old")
    old = open_recording(tmp_path / "old")
    assert new.damage == []
    for table in ("power", "marks", "events", "edges", "windows"):
        assert old.table(table).to_pylist() == new.table(table).to_pylist()
    (line,) = old.damage
    assert "power.arrows" in line
    assert "without checksums" in line


def test_an_old_table_whose_only_batch_is_not_found_is_said_to_be_unchecked(tmp_path: Path) -> None:
    folder = recordings.make(tmp_path / "run")
    without_seals(folder)
    path = folder / "marks.arrows"
    schema = pa.ipc.open_stream(path.read_bytes()).schema
    with pa.ipc.new_stream(path, schema):
        pass
    (line,) = (line for line in open_recording(folder).damage if "without checksums" in line)
    assert "marks.arrows" in line


def test_an_old_table_that_cannot_be_unpacked_is_said(tmp_path: Path) -> None:
    folder = recordings.make(tmp_path / "old")
    without_seals(folder)
    data = bytearray((folder / "events.arrows").read_bytes())
    at = data.index(b"net/layer_0/MatMul")
    data[at] = 0xFF  # no UTF-8
    (folder / "events.arrows").write_bytes(data)
    old = open_recording(folder)
    assert old.events.num_rows == 0
    assert any("events.arrows is damaged" in line for line in old.damage)


def test_a_table_that_is_gone_or_another_is_missed(tmp_path: Path) -> None:
    folder = recordings.make(tmp_path / "run", rows={"power.arrows": 241, "marks.arrows": 27})
    counted = {file.path.name: file.found.rows for t in ("power", "marks") for file in table_files(folder, t)}
    recordings.make(tmp_path / "counted", rows=counted)
    assert open_recording(tmp_path / "counted").damage == []
    (tmp_path / "counted" / "marks.arrows").unlink()
    (line,) = open_recording(tmp_path / "counted").damage
    assert line.startswith("marks.arrows is missing: epochs, steps and regions")
    recordings.make(tmp_path / "more", rows={**counted, "power.arrows": counted["power.arrows"] + 1})
    (line,) = open_recording(tmp_path / "more").damage
    assert "power.arrows has" in line


def test_a_table_of_another_recording_with_as_many_rows_is_noticed(tmp_path: Path) -> None:
    """As after a copy that mixed two runs of one program."""
    folder, other = recordings.make(tmp_path / "run"), recordings.make(tmp_path / "other")
    counted = {file.path.name: file.found.rows for t in ("power", "marks") for file in table_files(folder, t)}
    info = {**json.loads((folder / "run.json").read_text()), "rows": counted}
    write_info(folder, {**info, "seals": seal.last_seals(folder, [*counted, "events.arrows", "gone.arrows"])})
    assert open_recording(folder).damage == []
    rows = rows_of((other / "marks.arrows").read_bytes())
    later = [{**row, "t_ns": row["t_ns"] + 1} for row in rows]  # pyright: ignore[reportOperatorIssue]
    (other / "marks.arrows").unlink()
    writer = TableWriter(other / "marks.arrows", MARKS)
    writer.write(pa.Table.from_pylist(later, schema=MARKS).to_batches()[0])
    writer.close()
    shutil.copy(other / "marks.arrows", folder / "marks.arrows")
    (line,) = open_recording(folder).damage
    assert line.startswith("marks.arrows is not the file that this run wrote, but another's: epochs")
    # A cut one is said to be cut, and no more.
    (folder / "marks.arrows").write_bytes((folder / "marks.arrows").read_bytes()[:-100])
    assert not any("another's" in line for line in open_recording(folder).damage)


def test_where_nothing_is_left_the_words_say_so(tmp_path: Path) -> None:
    folder = recordings.make(tmp_path / "run")
    data = bytearray((folder / "power.arrows").read_bytes())
    data[data.index(b"crc32 ") + 6] ^= 1  # the schema's: all leans on it
    (folder / "power.arrows").write_bytes(data)
    said = " ".join(open_recording(folder).damage)
    assert "power.arrows is damaged: all of it is not as it was written and left out: energy" in said


def test_every_change_of_run_json_is_said(tmp_path: Path) -> None:
    folder = recordings.make(tmp_path / "run", events=False)
    data = (folder / "run.json").read_bytes()
    assert open_recording(folder).damage == []
    assert data == sealed_json(json.loads(data))
    readable = 0
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 7
        (folder / "run.json").write_bytes(changed)
        try:
            recording = open_recording(folder)
        except UserError:
            continue
        readable += 1
        assert any(line.startswith("run.json was changed") for line in recording.damage), (at, changed[at])
    assert readable > len(data) // 3
    (folder / "run.json").write_bytes(re.sub(rb',\s*"crc32".*', b"\n}", data, flags=re.DOTALL))
    assert any(line.startswith("run.json was changed") for line in open_recording(folder).damage)


def test_an_interrupted_run_is_no_damage_and_says_what_may_be_missing(tmp_path: Path) -> None:
    folder = recordings.make(tmp_path / "run", status="running", supervisor_pid=2**22 + 1)
    path = folder / "power.arrows"
    path.write_bytes(path.read_bytes()[:-30])
    recording = open_recording(folder)
    assert recording.status == "interrupted"
    assert recording.damage == ["the run was interrupted: what came last may be missing from power.arrows"]


@pytest.mark.parametrize("status", ["running", "interrupted"])
def test_a_file_that_another_goes_on_from_is_whole_or_said_to_be_cut(tmp_path: Path, status: str) -> None:
    pid = os.getpid() if status == "running" else 2**22 + 1
    folder = recordings.make(tmp_path / "run", status="running", supervisor_pid=pid)
    first = folder / "power.arrows"
    shutil.copy(first, folder / "power.0.1.arrows")
    assert open_recording(folder).damage == []
    first.write_bytes(first.read_bytes()[:-8])
    said = [line for line in open_recording(folder).damage if line.startswith("power.arrows")]
    assert len(said) == 1
    assert "cut off, and what came after is lost" in said[0]


def test_a_spool_with_a_line_that_is_none_is_said(tmp_path: Path) -> None:
    folder = recordings.make(tmp_path / "run", status="running", supervisor_pid=2**22 + 1)
    (folder / "marks.arrows").unlink()
    (folder / "spool").mkdir()
    good = b'{"t_ns":5,"name":"step_end"}\n'
    spool = folder / "spool" / "marks-7.jsonl"
    spool.write_bytes(good + b'{"t_ns":6,"na')  # cut off by a crash
    assert open_recording(folder).damage == []
    spool.write_bytes(good + b'{"t_ns":6,"na\n' + good)
    assert any("marks-7.jsonl is damaged" in line for line in open_recording(folder).damage)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second of its power is gone."""
    folder = recordings.whole(tmp_path_factory.mktemp("damaged") / "run")
    path = folder / "power.arrows"
    data = bytearray(path.read_bytes())
    begin, end = list(messages(bytes(data)))[3]
    data[(begin + end) // 2] ^= 1
    path.write_bytes(data)
    path = folder / "marks.arrows"
    path.write_bytes(path.read_bytes()[:-8])
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["show"],
        ["show", "--json"],
        ["show", "WHOLE", "--subtract"],
        ["report"],
        ["report", "--json"],
        ["report", "--by", "device"],
        ["report", "--by", "step"],
        ["report", "--by", "layer"],
        ["report", "--traced"],
        ["report", "WHOLE"],
        ["report", "--json", "WHOLE"],
        ["report", "WHOLE", "--baseline"],
        ["report", "--html", "OUT"],
        ["report", "--figures", "OUT", "--only", "power", "--format", "svg"],
        ["account"],
        ["account", "--json", "-"],
        ["account", "--tree"],
        ["account", "WHOLE", "--baseline"],
        ["compare", "WHOLE"],
        ["compare", "--json", "WHOLE"],
        ["compare", "WHOLE", "WHOLE"],
        ["export", "--to", "prometheus", "-o", "-"],
        ["export", "--to", "csv", "-o", "OUT"],
        ["export", "--to", "perfetto", "-o", "OUT"],
        ["export", "WHOLE", "--to", "markdown", "-o", "-", "--baseline"],
    ],
    ids=" ".join,
)
def test_every_verb_says_what_is_damaged_and_what_that_does(
    damaged: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from smaragdine.cli.main import main

    whole = recordings.whole(tmp_path / "whole")
    named = {"WHOLE": str(whole), "OUT": str(tmp_path / "out")}
    verb, *more = [named.get(word, word) for word in words]
    last = words[-1] in ("--subtract", "--baseline", "WHOLE")
    if words[-1] in ("--subtract", "--baseline"):
        idle = tmp_path / "idle"
        shutil.copytree(damaged, idle)
        write_info(idle, {**json.loads((idle / "run.json").read_text()), "asked": asked("baseline")})
        damaged = idle
    code = main([verb, *more, str(damaged)] if last else [verb, str(damaged), *more])
    said = capsys.readouterr()
    text = " ".join((said.out + said.err).split())  # a terminal breaks lines
    if "--html" in words:
        packed = max(re.findall(r"[A-Za-z0-9+/=]{1000,}", (tmp_path / "out").read_text()), key=len)
        text += zlib.decompress(base64.b64decode(packed)).decode("utf-8", "replace")
    assert code == 0, text
    assert "power.arrows is damaged" in text
    assert "energy of that time is missing from the figures" in text
    assert "marks.arrows is damaged" in text


@pytest.mark.parametrize("words", [["account"], ["compare", "WHOLE"], ["export", "--to", "latex", "-o", "-"]])
def test_where_all_is_lost_the_reason_is_the_damage(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from smaragdine.cli.main import main

    for table in ("power", "events"):
        folder = recordings.make(tmp_path / table)
        path = folder / f"{table}.arrows"
        path.write_bytes(path.read_bytes()[:-100])
        assert main([word.replace("WHOLE", str(folder)) for word in [*words, str(folder)]]) == 2
        assert f"{table}.arrows is damaged" in capsys.readouterr().err
