"""Files from elsewhere that once ended in a traceback, a crash or gigabytes: each is read, or one line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import footprints
import foreign_files
import recordings
from cli import smaragdine
from refusal import refused
from smaragdine.accounting import footprint as footprint_files
from smaragdine.errors import UserError
from smaragdine.files import parse_json, read_json
from smaragdine.recording.power_logs import read_power
from smaragdine.recording.reader import open_recording
from smaragdine.sweep.experiment import read_experiments
from smaragdine.sweep.fit import analyse
from smaragdine.sweep.measurements import ColumnNames, read_groups
from smaragdine.tracing.files import read_events

EVENTS = "name,device,start_ns,duration_ns\na,gpu:0,1,2\nb,gpu:0,3,4\n"
POWER = "device,t_ns,power_w\ngpu:0,1,2.5\ngpu:0,3,4.5\n"
SMI = """timestamp, index, power.draw [W]
2026/11/15 10:52:16.123, 0, 71.45 W
2026/11/15 10:52:16.223, 0, 71.50 W
"""
MEASURED = "limit,time,power\n100,4,10\n150,2,15\n200,1,50\n"
MANY = 10_000  # digits: more than Python makes a number of


def put(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# Text


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"])
def test_a_csv_with_any_line_end_is_the_same(tmp_path: Path, end: str) -> None:
    def file(name: str, text: str) -> Path:
        return put(tmp_path, name, text.replace("\n", end))

    assert read_events(file("e.csv", EVENTS))["start_ns"].to_pylist() == [1, 3]
    assert read_events(file("nosuffix", EVENTS))["name"].to_pylist() == ["a", "b"]
    assert read_power(file("p.csv", POWER))["power_w"].to_pylist() == [2.5, 4.5]
    assert read_power(file("s.csv", SMI), "UTC")["power_w"].to_pylist() == [71.45, 71.5]
    (group,) = read_groups(file("m.csv", MEASURED), ColumnNames("limit", "time", "power"))
    assert group.limit.tolist() == [100, 150, 200]


def test_the_command_line_takes_carriage_returns(tmp_path: Path) -> None:
    events, power = (
        put(tmp_path, f"{n}.csv", text.replace("\n", "\r")) for n, text in ((1, EVENTS), (2, POWER))
    )
    done = smaragdine("account", "--events", events, "--power", power)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("length", range(1, SMI.index("\n2026") + 12))
def test_a_log_of_nvidia_smi_cut_within_its_header_is_one_line(tmp_path: Path, length: int) -> None:
    refused(lambda: read_power(put(tmp_path, "s.csv", SMI[:length])), "s.csv")


@pytest.mark.parametrize("at", [3, len(EVENTS) - 3])
@pytest.mark.parametrize("read", [read_events, read_power])
def test_text_that_is_no_utf_8_is_one_line(tmp_path: Path, read: Any, at: int) -> None:
    data = (EVENTS if read is read_events else POWER).encode()
    refused(lambda: read(put(tmp_path, "t.csv", data[:at] + b"\xe9" + data[at:])), "t.csv is not UTF-8")
    latin = SMI.replace("71.45 W", "71.45 W, é").encode("latin-1")
    refused(lambda: read_power(put(tmp_path, "s.csv", latin)), "s.csv is not UTF-8")


def with_bad_name(kind: str) -> bytes:
    """A table whose words are bytes that somebody declared to be text; of `column`, a column's own name."""
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    columns = {"name": bad, "device": ["gpu:0"], "start_ns": [1], "duration_ns": [2], "zebra": [1]}
    table, out = pa.table(columns), io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, out)
    elif kind in ("stream", "column"):
        if kind == "column":
            table = table.set_column(0, "name", pa.array(["a"]))
        with pa.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
    else:
        with pa.ipc.new_file(out, table.schema) as file:
            file.write_table(table)
    data = out.getvalue()
    return data.replace(b"zebra", b"z\xffbra") if kind == "column" else data


@pytest.mark.parametrize("kind", ["parquet", "stream", "file", "column"])
def test_words_of_a_table_that_are_no_utf_8_are_one_line(tmp_path: Path, kind: str) -> None:
    refused(lambda: read_events(put(tmp_path, "e.bin", with_bad_name(kind))), "e.bin is not UTF-8")


def doubled(data: bytes) -> Iterator[tuple[str, bytes]]:
    """A table with each of its columns twice, one at a time; nothing of what is no table."""
    if data[:4] == b"PAR1":
        table = pq.read_table(io.BytesIO(data))
    elif data[:6] == b"ARROW1":
        table = pa.ipc.open_file(io.BytesIO(data)).read_all()
    elif data[:4] == b"\xff" * 4:
        table = pa.ipc.open_stream(io.BytesIO(data)).read_all()
    else:
        yield from doubled_text(data.decode("latin-1").splitlines())
        return
    for at, name in enumerate(table.column_names):
        twice, out = table.append_column(table.schema.field(at), table.column(at)), io.BytesIO()
        if data[:4] == b"PAR1":
            pq.write_table(twice, out)
        else:
            new = pa.ipc.new_file if data[:6] == b"ARROW1" else pa.ipc.new_stream
            with new(out, twice.schema) as writer:
                writer.write_table(twice)
        yield name, out.getvalue()


def doubled_text(lines: list[str]) -> Iterator[tuple[str, bytes]]:
    mark = next((mark for mark in ",\t;" if mark in lines[0]), "")
    if mark and lines[0][0] not in "[{":
        for at, name in enumerate(lines[0].split(mark)):
            yield name.strip(' "'), "\n".join(line + mark + line.split(mark)[at] for line in lines).encode()


def test_a_table_with_a_column_twice_is_one_line_in_every_reader(tmp_path: Path) -> None:
    tried = 0
    for reader in foreign_files.readers():
        folder = tmp_path / reader.name.replace(" ", "-")
        folder.mkdir()
        foreign_files.sound(reader, folder)
        for whole in reader.whole:
            for name, data in doubled(whole):
                path = put(folder, reader.file, data)
                refused(lambda read=reader.read, at=path: read(at), f"two columns named {name}")
                tried += 1
    assert tried > 150


# Numbers


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("9" * MANY, "is beyond 64 bits"),
        ("-" + "9" * MANY, "is beyond 64 bits"),
        ("9223372036854775808", "is beyond 64 bits"),
        ("1e3", "is no whole number"),
        ("1_000", "is no whole number"),
        ("nan", "is no whole number"),
    ],
)
def test_a_time_that_is_none_is_one_short_line(tmp_path: Path, cell: str, why: str) -> None:
    with pytest.raises(UserError) as caught:
        read_events(put(tmp_path, "e.csv", EVENTS.replace(",1,2", f",{cell},2")))
    assert f"row 1: start_ns {why}" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_long_number_that_is_short_is_read(tmp_path: Path) -> None:
    for cell in ("0" * MANY + "7", "7." + "0" * MANY, "+7"):
        path = put(tmp_path, "e.csv", EVENTS.replace(",1,2", f",{cell},2"))
        assert read_events(path)["start_ns"].to_pylist() == [7, 3]


@pytest.mark.parametrize("cell", ["1_000", "٣", "0x10", "", "9" * MANY, "inf", "NaN", "1e400"])
def test_a_power_that_is_none_is_one_short_line(tmp_path: Path, cell: str) -> None:
    with pytest.raises(UserError, match="power_w") as caught:
        read_power(put(tmp_path, "p.csv", POWER.replace("2.5", cell)))
    assert len(str(caught.value)) < 300


def test_limits_of_which_no_curve_can_be_told_are_one_line(tmp_path: Path) -> None:
    path = put(tmp_path, "m.csv", MEASURED.replace("200,", "1e200,"))
    refused(lambda: analyse(read_groups(path, ColumnNames("limit", "time", "power"))), "too close together")
    path = put(tmp_path, "m.csv", MEASURED.replace("200,1,50", "200,1e200,1e200"))
    refused(lambda: read_groups(path, ColumnNames("limit", "time", "power")), "beyond what a number can be")
    near = MEASURED.replace("200,", "3e-200,").replace("150,", "2e-199,").replace("100,", "1e-199,")
    path = put(tmp_path, "m.csv", near)
    refused(lambda: analyse(read_groups(path, ColumnNames("limit", "time", "power"))), "too close together")


# JSON and YAML


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"9" * MANY, "beyond what a number can be"),
        (b"-" + b"9" * 25, "beyond what a number can be"),
        (b"1e999", "beyond what a number can be"),
        (b"NaN", "no number"),
        (b"-Infinity", "no number"),
        (b"\xff", "decode"),
        (b"", "Expecting value"),
    ],
)
def test_json_that_is_odd_is_a_value_error(tmp_path: Path, text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        read_json(put(tmp_path, "x.json", text))
    assert len(str(caught.value)) < 200


def test_json_that_is_right_is_read(tmp_path: Path) -> None:
    value = {"a": [1, -2.5, 1e-300, 2**63, True, None, "\ud800"]}
    assert parse_json(json.dumps(value)) == value
    assert parse_json("[NaN]", nan=True)[0] != 0


def test_a_file_without_end_is_not_read_whole(tmp_path: Path) -> None:
    with open(tmp_path / "x.json", "wb") as file:
        file.truncate(1 << 40)  # of zeros that are on no disk
    with pytest.raises(ValueError, match="larger than"):
        read_json(tmp_path / "x.json")


def test_an_experiment_of_aliases_of_aliases_is_one_line(tmp_path: Path) -> None:
    levels = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 50)}]" for n in range(1, 6))
    text = f"l0: &l0 [x]\n{levels}\nexperiments: *l5\n"
    refused(lambda: read_experiments(put(tmp_path, "e.yaml", text)), "more than 100,000 values")
    refused(lambda: read_experiments(put(tmp_path, "e.yaml", "experiments: &a [*a]\n")), "e.yaml")
    refused(lambda: read_experiments(put(tmp_path, "e.yaml", f"seed: {'9' * MANY}\n")), "e.yaml")
    refused(lambda: read_experiments(put(tmp_path, "e.yaml", "[" * 5000)), "e.yaml")
    refused(lambda: read_experiments(put(tmp_path, "e.json", '{"seed": "\\ud800"}')), "e.json")


# Footprints


def saved(folder: Path, suffix: str) -> Path:
    rows = [{"name": "a", "energy_j": 5.0}, {"name": "b", "energy_j": 4.0}]
    footprint_files.save(footprints.footprint(rows), folder / f"f.{suffix}")
    return folder / f"f.{suffix}"


def test_a_turned_bit_in_a_footprint_is_no_crash(tmp_path: Path) -> None:
    """Read without a check, the offsets of its texts led anywhere in memory."""
    path = saved(tmp_path, "arrow")
    data = path.read_bytes()
    at = data.index(b"gpu:0gpu:0") - 64
    refusals = 0
    for n in range(0, 64, 4):
        path.write_bytes(data[: at + n + 3] + b"\x40" + data[at + n + 4 :])
        try:
            footprint_files.to_json(footprint_files.load(path))
        except UserError:
            refusals += 1
    assert refusals


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("total_j", "5"),
        ("total_j", None),
        ("total_j", 1e300),
        ("idle_j", []),
        ("steps", 1.5),
        ("rows", 5),
        ("rows", [5]),
    ],
)
def test_a_footprint_of_another_shape_is_one_line(tmp_path: Path, key: str, value: Any) -> None:
    path = saved(tmp_path, "json")
    values = json.loads(path.read_text())
    values["devices"]["gpu:0"][key] = value
    path.write_text(json.dumps(values))
    refused(lambda: footprint_files.load(path), "f.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [("energy_j", None), ("energy_j", 1e300), ("busy_s", 1e-320), ("count", None), ("name", None)],
)
def test_a_row_that_cannot_be_is_named(tmp_path: Path, key: str, value: Any) -> None:
    path = saved(tmp_path, "json")
    values = json.loads(path.read_text())
    values["devices"]["gpu:0"]["rows"][1][key] = value
    path.write_text(json.dumps(values))
    refused(lambda: footprint_files.load(path), "f.json, row 2", key)


def test_a_row_of_a_device_without_total_is_named(tmp_path: Path) -> None:
    rows = footprints.footprint([{"name": "a", "energy_j": 5.0}])
    gone = footprint_files.Footprint(rows.rows, {})
    footprint_files.save(gone, tmp_path / "f.parquet")
    refused(lambda: footprint_files.load(tmp_path / "f.parquet"), "f.parquet, row 1", "device has no total")


# Tables of a recording that have no checksums


def unsealed(path: Path, change: Any) -> None:
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    rows = table.to_pylist()
    change(rows)
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(pa.Table.from_pylist(rows, schema=table.schema))


@pytest.mark.parametrize(
    ("table", "column", "value", "why"),
    [
        ("windows", "rank", None, "has no rank"),
        ("windows", "asked_ns", None, "has no asked_ns"),
        ("windows", "steps", None, "has no steps"),
        ("windows", "steps", [{"index": 1, "begin_ns": None, "end_ns": 5}], "has no begin_ns"),
        ("windows", "steps", [None], "has no index"),
        ("windows", "end_ns", 2**62 + 1, "no time"),
        ("events", "duration_ns", -1, "ends before it begins"),
        ("events", "name", None, "has no name"),
        ("marks", "t_ns", None, "has no t_ns"),
        ("power", "t_ns", -(2**63), "no time"),
        ("edges", "source", None, "has no source"),
    ],
)
def test_a_row_of_an_old_table_that_cannot_be_is_one_line(
    tmp_path: Path, table: str, column: str, value: Any, why: str
) -> None:
    folder = recordings.make(tmp_path / "run")
    unsealed(folder / f"{table}.arrows", lambda rows: rows[0].update({column: value}))
    refused(lambda: open_recording(folder).table(table), f"{table}.arrows is damaged", why)


def test_a_step_that_ends_before_it_begins_is_none(tmp_path: Path) -> None:
    from smaragdine.accounting.run import Run

    folder = recordings.make(tmp_path / "run")
    whole = Run.open(folder).steps

    def back(rows: list[dict[str, Any]]) -> None:
        rows[0]["steps"][0]["end_ns"] = rows[0]["steps"][0]["begin_ns"]

    unsealed(folder / "windows.arrows", back)
    found = Run.open(folder).steps
    assert found is not None
    assert whole is not None
    assert len(found.traced_ns) == len(whole.traced_ns) - 1
