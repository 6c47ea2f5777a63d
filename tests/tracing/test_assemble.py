"""Raw traces become events wholly or stay: whoever reads them may be ended, or have no room, at any point."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from smaragdine.cli.report import _opened  # pyright: ignore[reportPrivateUsage]
from smaragdine.errors import UserError
from smaragdine.recording import writer
from smaragdine.recording.folder import write_info
from smaragdine.recording.reader import Recording, open_recording
from smaragdine.tracing.assemble import NotWritten, assemble

BEGIN_NS = 1_700_000_000_000_000_000
WINDOWS = 3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A recording of three windows of one step each, that were never read."""
    made(tmp_path, status="complete")
    (tmp_path / "traces").mkdir()
    for n in range(WINDOWS):
        begin_ns = BEGIN_NS + n * 10**9
        end_ns = begin_ns + 10**8
        times = {"asked_ns": begin_ns, "begin_ns": begin_ns, "end_ns": end_ns, "stopped_ns": end_ns}
        event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 7, "dur": 20_000.0}
        event |= {"ts": (begin_ns + 10**6) / 1000, "args": {"External id": 1}}
        meta = {"framework": "torch", "format": "kineto", "suffix": ".json", "rank": 0, "pid": 7, **times}
        meta |= {"resumed_ns": end_ns, "source": "torch", "steps": [[n, begin_ns, end_ns]]}
        stem = tmp_path / "traces" / f"torch-7-{n}"
        stem.with_suffix(".json").write_text(json.dumps({"baseTimeNanoseconds": 0, "traceEvents": [event]}))
        stem.with_suffix(".meta.json").write_text(json.dumps(meta))
    return tmp_path


def made(folder: Path, **more: Any) -> None:
    clock = {"begin": {"wall_ns": BEGIN_NS, "mono_ns": 0}}
    (folder / "run.json").write_text(json.dumps({"format_version": 1, "clock": clock, **more}))


def raw_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("traces/*"))


def check_whole(recording: Recording) -> None:
    assert recording.events.num_rows == recording.windows.num_rows == WINDOWS
    assert recording.events["step"].to_pylist() == [0, 1, 2]
    assert not (recording.path / "traces").exists()


@pytest.mark.parametrize("status", ["complete", "running"])  # running: its supervisor is gone
def test_ended_after_any_window_it_begins_anew(run: Path, status: str) -> None:
    before = raw_files(run)
    made(run, status=status, supervisor_pid=2**30)
    for after in range(1, WINDOWS + 1):

        def stop(done: int, of: int, after: int = after) -> None:
            assert of == WINDOWS
            if done == after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            assemble(run, on_window=stop)
        assert raw_files(run) == before
        assert not open_recording(run).windows.num_rows
    check_whole(_opened(str(run)).recording)


def test_a_full_disk_costs_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = raw_files(run)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(writer.os, "pwrite", full)
        with pytest.raises(NotWritten, match=r"No space left.*Make room"):
            assemble(run)
    assert raw_files(run) == before
    assert not list(run.glob("*.arrows"))
    assemble(run)
    check_whole(open_recording(run))


@pytest.mark.parametrize("table", ["events", "edges", "windows"])
def test_a_table_of_the_trace_that_goes_is_missed(run: Path, table: str) -> None:
    meta = run / "traces" / "torch-7-0.meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "edges": [["a/mm", "b/mm"]]}))
    write_info(run, json.loads((run / "run.json").read_text()))
    assemble(run)
    assert open_recording(run).damage == []
    assert open_recording(run).info["rows"] == {"events.arrows": 3, "windows.arrows": 3, "edges.arrows": 1}
    assert open_recording(run).info["seals"].keys() == open_recording(run).info["rows"].keys()
    (run / f"{table}.arrows").unlink()
    assert [line.partition(":")[0] for line in open_recording(run).damage] == [f"{table}.arrows is missing"]


def test_a_run_json_that_was_changed_gets_no_new_checksum(run: Path) -> None:
    write_info(run, json.loads((run / "run.json").read_text()))
    changed = (run / "run.json").read_bytes().replace(b"17000", b"17001")
    (run / "run.json").write_bytes(changed)
    assemble(run)
    assert (run / "run.json").read_bytes() == changed
    assert "was changed after it was written" in open_recording(run).damage[0]


def test_of_two_readers_one_waits(run: Path) -> None:
    before = raw_files(run)
    held = os.open(run / "traces", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="being read by another process"):
        assemble(run)
    os.close(held)
    assert raw_files(run) == before
    assemble(run)
    check_whole(open_recording(run))


def test_traces_of_a_run_that_goes_on_are_left(run: Path) -> None:
    made(run, status="running", supervisor_pid=os.getpid())
    before = raw_files(run)
    assert _opened(str(run)).recording.events.num_rows == 0
    assert raw_files(run) == before


@pytest.mark.parametrize("text", ["[1]", "5", "{}", '{"suffix": 5}', "{", '{"suffix": ".json"}'])
def test_a_meta_file_of_another_shape_is_named(run: Path, text: str) -> None:
    (run / "traces" / "torch-7-0.meta.json").write_text(text)
    said = assemble(run)
    assert [line for line in said if line.startswith("the trace torch-7-0.meta.json cannot be used: ")]
    assert open_recording(run).windows.num_rows == WINDOWS - 1
    assert raw_files(run) == ["torch-7-0.json", "torch-7-0.meta.json"]


@pytest.mark.parametrize(
    "odd",
    [
        {"rank": "x"},
        {"rank": 2**40},
        {"steps": [[2**70, BEGIN_NS, BEGIN_NS + 10**8]]},
        {"compiled": [1]},
        {"edges": [["a", "\ud800"]]},
        {"pid": []},
        {"suffix": "/"},
    ],
)
def test_a_window_of_another_shape_costs_no_other(run: Path, odd: dict[str, Any]) -> None:
    path = run / "traces" / "torch-7-0.meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **odd}))
    check_only_the_first_is_named(run)


@pytest.mark.parametrize("time", ["1e999999999", '"NaN"', str(2**70)])
def test_a_trace_of_another_shape_costs_no_other(run: Path, time: str) -> None:
    path = run / "traces" / "torch-7-0.json"
    event = '"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 7, "dur": 1'
    path.write_text(f'{{"baseTimeNanoseconds": 0, "traceEvents": [{{{event}, "ts": {time}}}]}}')
    check_only_the_first_is_named(run)


def check_only_the_first_is_named(run: Path) -> None:
    said = assemble(run)
    assert [line for line in said if line.startswith("the trace torch-7-0.meta.json cannot be used: ")]
    recording = open_recording(run)
    assert recording.events["step"].to_pylist() == [1, 2]
    assert recording.windows.num_rows == WINDOWS - 1
    assert raw_files(run) == ["torch-7-0.json", "torch-7-0.meta.json"]


def test_a_slice_of_another_shape_costs_no_other(run: Path) -> None:
    for n in range(WINDOWS):
        path = run / "traces" / f"torch-7-{n}.meta.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "steps": [], "rank": 0 if n else "x"}))
    said = assemble(run)
    assert [line for line in said if line.startswith("the trace torch-7-0.meta.json cannot be used: ")]
    recording = open_recording(run)
    assert recording.windows.num_rows == recording.events.num_rows == WINDOWS - 1
    assert raw_files(run) == ["torch-7-0.json", "torch-7-0.meta.json"]


def test_what_runs_in_some_steps_only_is_said_once_and_of_the_model(run: Path) -> None:
    """Three windows of two steps: a layer runs once in each, and so does what a loader fetches ahead."""
    for n in range(WINDOWS):
        begin_ns = BEGIN_NS + n * 10**9
        stem = run / "traces" / f"torch-7-{n}"
        meta = json.loads(stem.with_suffix(".meta.json").read_text())
        half_ns = begin_ns + 5 * 10**7
        meta["steps"] = [[2 * n, begin_ns, half_ns], [2 * n + 1, half_ns, meta["end_ns"]]]
        stem.with_suffix(".meta.json").write_text(json.dumps(meta))

        def call(name: str, at_ms: float, ms: float, cat: str, begin_ns: int = begin_ns) -> dict[str, Any]:
            return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 7, "dur": ms * 1e3,
                    "ts": begin_ns / 1000 + at_ms * 1e3, "args": {"External id": int(at_ms)}}  # fmt: skip

        events = [
            call(f"smaragdine:Net{n}", 1, 8, "user_annotation"),
            call("aten::mm", 2, 5, "cpu_op"),
            call("enumerate(DataLoader)#_Iter.__next__", 20, 8, "user_annotation"),
            call("aten::empty", 21, 5, "cpu_op"),
        ]
        stem.with_suffix(".json").write_text(json.dumps({"baseTimeNanoseconds": 0, "traceEvents": events}))
    said = [line for line in assemble(run) if "equally often" in line]
    names = open_recording(run).events["name"].to_pylist()
    assert names.count("input/_Iter/empty") == WINDOWS, names
    assert said == [
        "torch (rank 0): 3 operations of the model did not run equally often in all traced steps: "
        "Net0/mm, Net1/mm, Net2/mm"
    ]
    windows = open_recording(run).windows.to_pylist()
    assert [window["counts_divide"] for window in windows] == [False] * WINDOWS
    assert sum("equally often" in remark for window in windows for remark in window["remarks"]) == 1
