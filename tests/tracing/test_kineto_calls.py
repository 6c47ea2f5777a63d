"""What rebuilds the calls that launched kernels, from a file as Kineto writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from smaragdine.arrow import pc
from smaragdine.tracing.kineto.calls import merged
from smaragdine.tracing.kineto.window import events_of

SETTINGS = {"tf32": False, "lists": [[[[3], [1]]]]}


class Trace:
    """Operators of one thread, with their kernels, in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.number = 0

    def op(self, name: str, ts: float, dur: float, **args: Any) -> int:
        self.number += 1
        shapes = {
            "Input Dims": [[4, 8], []],
            "Input Strides": [[8, 1], []],
            "Input type": ["float", "Scalar"],
            "Concrete Inputs": ["", "1"],
        }
        known = {"External id": self.number, **shapes, **args}
        self.events.append(
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": name,
                "pid": 1,
                "tid": 1,
                "ts": ts,
                "dur": dur,
                "args": known,
            }
        )
        return self.number

    def kernel(
        self, op: int, name: str, ts: float, dur: float, launch: str = "cudaLaunchKernel", grid: int = 2
    ) -> None:
        self.number += 1
        ops = [each for each in self.events if each["cat"] == "cpu_op"]
        begin = next(each["ts"] for each in ops if each["args"]["External id"] == op)
        who = {"External id": op, "correlation": 1000 + self.number}
        self.events += [
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": launch,
                "pid": 1,
                "tid": 1,
                "ts": begin + 0.1,
                "dur": 0.1,
                "args": who,
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": 0,
                "tid": 7,
                "ts": ts,
                "dur": dur,
                "args": {**who, "device": 0, "stream": 7, "grid": [grid, 1, 1], "block": [64, 1, 1]},
            },
        ]

    def read(
        self,
        folder: Path,
        settings: dict[str, Any] | None = SETTINGS,
        sources: dict[str, str] | None = None,
        launches: list[dict[str, Any]] | None = None,
    ) -> tuple[list[Any], pa.Table]:
        """Calls of the kernels by time, and the table of calls."""
        path = folder / "torch-1-0.json"
        path.write_text(json.dumps({"traceEvents": self.events, "baseTimeNanoseconds": 0}))
        meta = {"steps": [[0, 0, 10**9]], "settings": settings, "compiled": {"kernels": sources}}
        meta["launches"] = launches
        table, coverage = events_of(path, meta)
        on_gpu = pc.equal(table["device"].cast(pa.string()), "gpu:0")
        kernels = table.filter(on_gpu)
        assert table.filter(pc.invert(on_gpu))["call"].null_count == table.num_rows - kernels.num_rows
        assert coverage.calls is not None
        return kernels.sort_by("start_ns")["call"].to_pylist(), coverage.calls


def test_a_kernel_belongs_to_the_innermost_operator(tmp_path: Path) -> None:
    trace = Trace()
    trace.op("aten::linear", 0, 10)
    trace.kernel(trace.op("aten::addmm", 1, 5), "gemm", 20, 7)
    of_kernels, calls = trace.read(tmp_path)
    (row,) = calls.to_pylist()
    assert of_kernels == [row["call"]]
    assert (row["op"], row["count"], row["busy_ns"], row["device"]) == ("aten::addmm", 1, 7000, "gpu:0")
    assert json.loads(row["inputs"]) == {
        "dims": [[4, 8], []],
        "strides": [[8, 1], []],
        "types": ["float", "Scalar"],
        "values": ["", "1"],
    }
    assert json.loads(row["kernels"]) == [["gemm", [2, 1, 1]]]
    assert json.loads(row["settings"]) == {"tf32": False}


def test_an_operator_with_kernels_of_its_own_has_those_of_its_children_too(tmp_path: Path) -> None:
    trace = Trace()
    outer = trace.op("aten::embedding_dense_backward", 0, 20)
    trace.kernel(outer, "sort", 30, 2)
    trace.kernel(trace.op("aten::fill_", 5, 3), "fill", 33, 1)
    of_kernels, calls = trace.read(tmp_path)
    (row,) = calls.to_pylist()
    assert of_kernels == [row["call"]] * 2
    assert row["op"] == "aten::embedding_dense_backward"
    assert [name for name, _ in json.loads(row["kernels"])] == ["sort", "fill"]


def test_calls_that_differ_in_anything_that_matters_are_apart(tmp_path: Path) -> None:
    trace = Trace()
    for i, more in enumerate(({}, {}, {"Input Strides": [[1, 4], []]}, {"Concrete Inputs": ["", "2"]})):
        trace.kernel(trace.op("aten::mul", 10 * i, 5, **more), "mul", 100 + 10 * i, 3)
    trace.kernel(trace.op("aten::mul", 60, 5), "mul", 160, 3, grid=9)
    of_kernels, calls = trace.read(tmp_path)
    assert sorted(calls["count"].to_pylist()) == [1, 1, 1, 2]
    assert len(set(of_kernels)) == 4
    assert of_kernels[0] == of_kernels[1]


def test_backward_nodes_and_graphs_cannot_be_made_again(tmp_path: Path) -> None:
    """A kernel of a function written by hand, or of a CUDA graph: the table says why."""
    trace = Trace()
    trace.kernel(trace.op("MyFunctionBackward", 0, 5), "mine", 20, 1)
    trace.kernel(trace.op("aten::mm", 6, 5), "captured", 30, 1, launch="cudaGraphLaunch")
    trace.kernel(trace.op("aten::mm", 12, 5, **{"Input Dims": None}), "unknown", 40, 1)
    of_kernels, calls = trace.read(tmp_path)
    rows = {row["call"]: row for row in calls.to_pylist()}
    assert [rows[key]["op"] for key in of_kernels] == ["mine", "captured", "unknown"]
    whys = [json.loads(rows[key]["inputs"])["why"] for key in of_kernels]
    assert whys[1] == "it ran from a CUDA graph"
    assert whys[0] == whys[2] == "the profiler does not know what it was called with"
    assert json.loads(rows[of_kernels[1]]["kernels"]) == [["captured", [2, 1, 1]]]
    assert (rows[of_kernels[0]]["count"], rows[of_kernels[0]]["busy_ns"]) == (1, 1000)


def test_a_generated_kernel_is_a_call_with_its_source(tmp_path: Path) -> None:
    """As inductor's launcher records it; one whose file was gone when the hook looked is none."""
    trace = Trace()
    about = {
        "kernel_backend": "triton",
        "kernel_file": "/tmp/torchinductor/ab/cab.py",
        "kernel_hash": "cab",
        "kernel_kwargs": "XBLOCK=128",
        "num_warps": 4,
        "num_stages": 1,
    }
    trace.op("## Call CompiledFxGraph fab ##", 0, 50)
    trace.kernel(trace.op("triton_poi_fused_add_0", 1, 5, **about), "triton_poi_fused_add_0", 20, 3)
    trace.kernel(trace.op("aten::mm", 7, 5), "gemm", 30, 7)
    gone = {**about, "kernel_hash": "cgone"}
    trace.kernel(trace.op("triton_poi_fused_mul_1", 14, 5, **gone), "triton_poi_fused_mul_1", 40, 3)
    of_kernels, calls = trace.read(tmp_path, sources={"cab": "import triton"})
    assert len(set(of_kernels)) == 3
    rows = {row["op"]: row for row in calls.to_pylist()}
    assert set(rows) == {"triton_poi_fused_add_0", "aten::mm", "triton_poi_fused_mul_1"}
    assert "source" in json.loads(rows["triton_poi_fused_mul_1"]["inputs"])["why"]
    assert json.loads(rows["triton_poi_fused_add_0"]["inputs"])["generated"] == {
        "source": "import triton",
        "blocks": "XBLOCK=128",
        "warps": 4,
        "stages": 1,
    }
    assert "generated" not in json.loads(rows["aten::mm"]["inputs"])


def test_what_the_profiler_drops_the_hook_tells(tmp_path: Path) -> None:
    """A profiler of all threads keeps a generated kernel's name, with our number, and no arguments."""
    trace = Trace()
    bare = dict.fromkeys(("Input Dims", "Input Strides", "Input type", "Concrete Inputs"))
    for number, at in ((0, 1), (1, 11), (0, 21), (7, 31)):
        name = f"triton_poi_fused_add_0 smaragdine-launch:{number}"
        op = trace.op(name, at, 5, **bare)
        for each in bare:
            trace.events[-1]["args"].pop(each)
        trace.kernel(op, "triton_poi_fused_add_0", 100 + at, 3)
    about = {"kernel_hash": "cab", "kernel_kwargs": "XBLOCK=128", "num_warps": 4, "num_stages": 1}
    said = {"strides": [[1], []], "types": ["float", "Scalar"], "values": ["", "64"]}
    launches = [{**about, "dims": [[size], []], **said} for size in (64, 128)]
    of_kernels, calls = trace.read(tmp_path, sources={"cab": "import triton"}, launches=launches)
    assert of_kernels[0] == of_kernels[2] != of_kernels[1]
    rows = {row["call"]: row for row in calls.to_pylist()}
    assert {row["op"] for row in rows.values()} == {"triton_poi_fused_add_0"}
    inputs = json.loads(rows[of_kernels[1]]["inputs"])
    assert (inputs["dims"], inputs["types"]) == ([[128], []], ["float", "Scalar"])
    assert inputs["generated"]["blocks"] == "XBLOCK=128"
    assert rows[of_kernels[0]]["count"] == 2
    # A number that nobody gave out is no reason to fail.
    assert "why" in json.loads(rows[of_kernels[3]]["inputs"])


def test_a_trace_without_shapes_has_no_calls(tmp_path: Path) -> None:
    trace = Trace()
    trace.kernel(trace.op("aten::mm", 0, 5), "gemm", 20, 1)
    for event in trace.events:
        for name in ("Input Dims", "Input Strides", "Input type", "Concrete Inputs"):
            event["args"].pop(name, None)
    of_kernels, calls = trace.read(tmp_path, None)
    assert (of_kernels, calls.num_rows) == ([None], 0)


def test_a_list_that_kineto_cut_carries_the_optimizers(tmp_path: Path) -> None:
    trace = Trace()
    lists = {"Input Dims": [[], []], "Input Strides": [[], []], "Input type": ["TensorList", "Scalar"]}
    trace.kernel(trace.op("aten::_foreach_mul_", 0, 5, **lists), "foreach", 20, 1)
    _, calls = trace.read(tmp_path)
    assert json.loads(calls["settings"][0].as_py()) == SETTINGS


def test_windows_are_one_table(tmp_path: Path) -> None:
    tables = []
    for window in range(2):
        trace = Trace()
        trace.kernel(trace.op("aten::mm", 0, 5), "gemm", 20 + window, 2)
        tables.append(trace.read(tmp_path)[1])
    together = merged(tables)
    assert together.num_rows == 1
    assert (together["count"].to_pylist(), together["busy_ns"].to_pylist()) == ([2], [4000])
    assert merged([]).num_rows == 0
