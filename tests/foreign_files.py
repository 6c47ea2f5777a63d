"""Every reader of files that others wrote or somebody may have edited, each with files that it reads."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import yaml

import footprints
import made_study
from smaragdine import protobuf
from smaragdine.accounting import footprint as footprint_files
from smaragdine.accounting.account import account_meters
from smaragdine.allocate.device import load_point, refuse_other
from smaragdine.allocate.profile import profile_table, read_epochs, read_profile, read_trainings
from smaragdine.api import account_inputs
from smaragdine.hetero.shards import read_allocation
from smaragdine.recording.marks import is_spoilt, read_spool
from smaragdine.recording.power_logs import read_power
from smaragdine.study.folder import read_made
from smaragdine.study.overhead import load_overhead
from smaragdine.study.results import load_result, load_sketch
from smaragdine.sweep.experiment import read_experiments
from smaragdine.sweep.measurements import ColumnNames, read_groups
from smaragdine.sweep.plan import make_plan, read_plan, save_plan
from smaragdine.sweep.table import Repetition, read_results, results_table
from smaragdine.tracing import step_stats
from smaragdine.tracing.assemble import assemble
from smaragdine.tracing.files import read_events

MS = 1_000_000
NOW_NS = 1_794_740_390_025_259_698


@dataclass(frozen=True)
class Reader:
    """`read` gets the file's path; `whole` are files that it reads."""

    name: str
    file: str  # its name, from the folder that `read` expects around it
    whole: tuple[bytes, ...]
    read: Callable[[Path], Any]
    often: int = 1
    around: Callable[[Path], None] | None = None  # makes what else is in that folder


def readers() -> Iterator[Reader]:
    yield from _events()
    yield from _power()
    yield from _footprints()
    yield from _sweeps()
    yield from _allocations()
    yield from _studies()
    yield from _raw_traces()


# Events and power


def _events() -> Iterator[Reader]:
    table = pa.table(
        {
            "name": ["net/layer_0/MatMul", "net/layer_0/MatMul", "copy", 'a "b", c'],
            "device": ["gpu:0", "gpu:0", "gpu:0", "cpu:0"],
            "start_ns": [NOW_NS, NOW_NS + 10 * MS, NOW_NS + 12 * MS, NOW_NS],
            "duration_ns": [8 * MS, 9 * MS, 3 * MS, 0],
            "phase": ["forward", "backward", None, "forward"],
            "lane": [7, 7, 9, None],
            "step": [3, 4, 4, None],
        }
    )
    encoded = table.set_column(0, "name", table["name"].dictionary_encode())
    for name, whole in _columnar(table).items():
        yield Reader(f"events {name}", f"events.{name}", whole, read_events)
    yield Reader("events dictionary", "events.arrows", (_stream(encoded), _feather(encoded)), read_events)
    traces = (json.dumps(_kineto()), json.dumps(_timeline()), json.dumps(_chrome()), json.dumps(_paired()))
    yield Reader("chrome", "trace.json", tuple(map(str.encode, traces)), read_events, often=5)
    yield Reader("xplane", "host.xplane.pb", (_xplane(),), read_events, often=3)

    def account(path: Path) -> Any:
        events, meters = account_inputs(path, _power_table(), None, None, None)
        return json.dumps(footprint_files.to_json(account_meters(events, meters)), allow_nan=False)

    csv, *_ = _columnar(table)["csv"]
    yield Reader("account events", "events.csv", (csv, json.dumps(_kineto()).encode()), account)

    def account_power(path: Path) -> Any:
        events, meters = account_inputs(table, path, None, None, None)
        return json.dumps(footprint_files.to_json(account_meters(events, meters)), allow_nan=False)

    yield Reader("account power", "power.csv", _columnar(_power_table())["csv"], account_power)


def _columnar(table: pa.Table) -> dict[str, tuple[bytes, ...]]:
    csv = io.BytesIO()
    pyarrow.csv.write_csv(table, csv)
    plain = io.BytesIO()
    pyarrow.csv.write_csv(table, plain, pyarrow.csv.WriteOptions(quoting_style="needed"))
    parquet, packed = io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet, compression="none", use_dictionary=False)
    pq.write_table(table, packed, compression="zstd")
    return {
        "csv": (csv.getvalue(), plain.getvalue()),
        "parquet": (parquet.getvalue(), packed.getvalue()),
        "arrow": (_feather(table), _stream(table)),
    }


def _feather(table: pa.Table) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_file(out, table.schema) as file:
        file.write_table(table)
    return out.getvalue()


def _stream(table: pa.Table) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    return out.getvalue()


def _complete(name: str, at_us: float, us: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 1, "tid": 2, "ts": at_us, "dur": us, **more}


def _process(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


def _kineto() -> dict[str, Any]:
    call = {"cat": "cuda_runtime", "args": {"correlation": 9, "External id": 5}}
    kernel = {"device": 0, "stream": 7, "correlation": 9, "External id": 5}
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": NOW_NS // 1000 * 1000,
        "traceEvents": [
            _process(1, "python"),
            _complete("ProfilerStep#3", 0, 90.5, cat="user_annotation"),
            _complete("aten::mm", 10.25, 20, cat="cpu_op", args={"External id": 5}),
            _complete("cudaLaunchKernel", 12, 3, **call),
            _complete("autograd::engine::evaluate_function: MmBackward0", 40, 20, cat="cpu_op"),
            _complete("Optimizer.step#SGD.step", 60, 20, cat="user_annotation"),
            {**_complete("sgemm", 20.125, 30.001, cat="kernel", args=kernel), "pid": 0, "tid": 7},
        ],
    }


def _timeline() -> dict[str, Any]:
    host = "/job:localhost/replica:0/task:0/device:GPU:0 Compute"
    return {
        "traceEvents": [
            _process(1, host),
            _process(2, host.replace(" Compute", "/stream:7 Compute")),
            _process(3, host.replace(" Compute", "/stream:all Compute")),
            _complete("MatMul", 1e9, 10, args={"name": "net/dense/MatMul", "op": "MatMul"}),
            {**_complete("MatMul", 1e9, 10, args={"name": "net/dense/MatMul"}), "pid": 2},
            {**_complete("MatMul", 1e9, 10, args={"name": "net/dense/MatMul"}), "pid": 3},
        ]
    }


def _chrome() -> list[Any]:
    return [_process(1, "GPU 1"), _complete("a", 1.5, 2), _complete("b", 3, 4, cat="x", args="odd")]


def _paired() -> list[Any]:
    who = {"pid": 1, "tid": 1}
    return [
        {"ph": "B", "name": "a", "ts": 1, **who},
        {"ph": "B", "name": "b", "ts": 2, **who},
        {"ph": "E", "ts": 3, **who},
        {"ph": "E", "name": "a", "ts": 9.5, **who},
    ]


def _xplane() -> bytes:
    space = protobuf.message_class()()
    plane = space.planes.add(name="Task Environment")
    plane.stat_metadata[1].name = "profile_start_time"
    plane.stats.add(metadata_id=1, uint64_value=NOW_NS)
    host = space.planes.add(name="/host:CPU")
    for key, name in enumerate(("train", "net/MatMul:MatMul", "dot.3", "hlo"), 1):
        host.event_metadata[key].name = name
    for key, name in enumerate(("step_num", "hlo_op", "hlo_module", "dot.3", "jit_step"), 1):
        host.stat_metadata[key].name = name
    python = host.lines.add(name="python", timestamp_ns=0, id=1)
    python.events.add(metadata_id=1, offset_ps=0, duration_ps=90_000).stats.add(metadata_id=1, int64_value=7)
    host.lines.add(name="tf_Compute/9", timestamp_ns=10, id=2).events.add(
        metadata_id=2, offset_ps=1_499, duration_ps=1_001
    )
    event = host.lines.add(name="tf_XLA/1", timestamp_ns=20, id=3).events.add(metadata_id=3, offset_ps=5)
    event.stats.add(metadata_id=2, ref_value=4)
    event.stats.add(metadata_id=3, ref_value=5)
    gpu = space.planes.add(name="/device:GPU:0")
    gpu.event_metadata[1].name = "sgemm"
    gpu.lines.add(name="Stream #7", timestamp_ns=15, id=7).events.add(metadata_id=1, duration_ps=40_000)
    return space.SerializeToString(deterministic=True)


def _power_table() -> pa.Table:
    stamps = [NOW_NS + n * 5 * MS for n in range(6)]
    return pa.table(
        {
            "device": ["gpu:0", "cpu:0"] * 6,
            "t_ns": [t_ns for t_ns in stamps for _ in range(2)],
            "power_w": [float(100 + 7 * n) for n in range(12)],
        }
    )


SMI = """timestamp, index, power.draw [W], power.draw.instant [W]
2026/11/15 10:52:16.123, 0, 71.45 W, 70.10 W
2026/11/15 10:52:16.123, 1, [N/A], 60.00 W
2026/11/15 10:52:16.223, 0, 71.50 W, 72.00 W
2026/11/15 10:52:16.223, 1, [N/A], 61.00 W
"""


def _power() -> Iterator[Reader]:
    for name, whole in _columnar(_power_table()).items():
        yield Reader(f"power {name}", f"power.{name}", whole, read_power)

    def local(path: Path) -> pa.Table:
        return read_power(path, "Europe/Berlin")

    yield Reader("nvidia-smi", "smi.csv", (SMI.encode(), SMI.replace(" W", "").encode()), local, often=3)


# Footprints


def _footprint() -> footprint_files.Footprint:
    return footprints.footprint(
        [
            {"name": "net/layer_0/MatMul", "energy_j": 5.0, "phase": "forward", "uncertainty_j": 0.5},
            {"name": "net/layer_1/MatMul", "energy_j": 4.0, "phase": "backward", "basis": "repetition"},
            {"name": "copy", "energy_j": 1.0, "device": "cpu:0", "step_mean_j": 0.5, "step_std_j": 0.1},
        ],
        idle_j=2.0,
        steps=3,
    )


def _footprints() -> Iterator[Reader]:
    made = _footprint()

    def load(path: Path) -> Any:
        from smaragdine.accounting.comparison import compare

        found = footprint_files.load(path)
        if path.suffix == ".json":  # of the others the rows are the same
            compare([found], [made])
        return json.dumps(footprint_files.to_json(found), allow_nan=False)

    for suffix in ("json", "parquet", "arrow"):
        yield Reader(f"footprint {suffix}", f"f.{suffix}", (_saved(made, suffix),), load, often=2)


def _saved(made: footprint_files.Footprint, suffix: str) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        footprint_files.save(made, path := Path(folder) / f"f.{suffix}")
        return path.read_bytes()


# Sweeps and tables of measurements

EXPERIMENTS: dict[str, Any] = {
    "seed": 7,
    "experiments": [
        {
            "name": "bert",
            "repeat": 2,
            "power_limits": [150, 200.5],
            "parameters": {"batch": [16, 32]},
            "cool_down": {"temperature_c": 45},
            "until": "2%",
            "benchmarks": [
                {"name": "small", "command": "train.py --epochs {epochs} {batch}", "epochs": 10},
                {"command": ["-m", "big.train", "{batch}"], "environment": {"B": "b{batch}"}},
            ],
        }
    ],
}
TOML = """seed = 7
[[experiments]]
name = "bert"
repeat = 2
clock_limits = [[877, 1005]]
[[experiments.benchmarks]]
command = "train.py"
expected_s = 1.5
"""
MEASURED = "limit,time,power,batch\n100,4,10,16\n150,2,15,16\n200,1,50,16\n250,1,60,16\n"


def _sweeps() -> Iterator[Reader]:
    text = json.dumps(EXPERIMENTS, indent=1)
    yield Reader("experiments json", "e.json", (text.encode(),), read_experiments)
    yield Reader("experiments yaml", "e.yaml", (yaml.safe_dump(EXPERIMENTS).encode(),), read_experiments)
    yield Reader("experiments toml", "e.toml", (TOML.encode(),), read_experiments)

    def plan(path: Path) -> Any:
        return read_plan(path.parent)

    def results(path: Path) -> Any:
        return read_results(path.parent)

    yield Reader("plan", "plan.json", (_plan(),), plan)
    rows = [
        Repetition("bert", "small", "power", n, f"runs/{n}", "complete", 150.0, time_s=2.0, energy_j=9.0)
        for n in range(3)
    ]
    out = io.BytesIO()
    pq.write_table(results_table(rows), out)
    yield Reader("results", "results.parquet", (out.getvalue(),), results)

    def groups(path: Path) -> Any:
        from smaragdine.sweep.fit import analyse

        return analyse(read_groups(path, ColumnNames("limit", "time", "power", by=("batch",))))

    table = pyarrow.csv.read_csv(io.BytesIO(MEASURED.encode()))
    texts = tuple(MEASURED.replace(",", mark).encode() for mark in ",\t;")
    yield Reader("measurements csv", "m.csv", texts, groups)
    yield Reader("measurements parquet", "m.parquet", _columnar(table)["parquet"], groups)
    yield Reader("measurements arrow", "m.arrow", _columnar(table)["arrow"], groups)


def _plan() -> bytes:
    import tempfile

    from smaragdine.sweep.experiment import checked

    with tempfile.TemporaryDirectory() as folder:
        found = checked(EXPERIMENTS, "e", Path(folder))
        save_plan(Path(folder), make_plan(found.experiments, 7, {"made_ns": 5}))
        return (Path(folder) / "plan.json").read_bytes()


# Profiles and published tables

EPOCHS = """dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power
cifar,resnet,32,adam,100,5.5,90.25
cifar,resnet,64,adam,100,4.5,95
"""
TRAININGS = """dataset,network,batch_size,optimizer,run,target_metric,target_epoch
cifar,resnet,32,adam,0,0.5,7
cifar,resnet,64,adam,0,0.5,nan
"""


def _allocations() -> Iterator[Reader]:
    profile = {
        str(batch): [{"power_limit": w, "energy": batch / 3, "time": batch / w} for w in (100, 150)]
        for batch in (16, 32, 64)
    }
    rows = [
        {"gpu": "a", "batch": batch, "power_limit_w": 100.0, "repeat": n, "steps": 5}
        | {"time_s": batch + n / 9, "energy_j": 30.0 * batch, "out_of_memory": False, "idle_w": 20.0}
        for batch in (16, 32)
        for n in range(2)
    ]
    out = io.BytesIO()
    pq.write_table(profile_table(rows), out)

    def read(path: Path) -> Any:
        return read_profile(path, "a")

    def split(path: Path) -> Any:
        return read_allocation(path)

    answer = {"method": "optimal", "cost": 5.0, "too_slow": False}
    answer |= {"allocation": [{"batch": 3, "power_limit_w": 100.0, "gpu": "a"}]}
    yield Reader("profile json", "p.json", (json.dumps(profile).encode(),), read)
    yield Reader("profile parquet", "p.parquet", (out.getvalue(),), read)
    yield Reader("epochs", "summary_v100.csv", (EPOCHS.encode(),), read_epochs)
    yield Reader("trainings", "trainings.csv", (TRAININGS.encode(),), read_trainings)
    yield Reader("allocation", "a.json", (json.dumps({"methods": [answer]}).encode(),), split)
    block = {"steps": 5, "time_s": 2.0, "energy_j": 3.0, "energy_error_j": 0.1}
    point = {
        "batch": 32,
        "power_limit_w": 150,
        "steps": {"blocks": [block], "updates": 9, "provenance": "measured"},
    }

    def load(path: Path) -> Any:
        return load_point(path.parent, 32, 150.0)

    def request(path: Path) -> Any:
        return refuse_other(path.parent, {"gpu": "a", "batches": [1, 2]})

    yield Reader("point", "batch32-150W.json", (json.dumps(point).encode(),), load)
    yield Reader("request", "request.json", (b'{"gpu": "a", "batches": [1, 2]}',), request)


# Studies


def _studies() -> Iterator[Reader]:
    made = {"format_version": 1, "seed": 5, "commands": [{"words": ["a"]}], "took_s": {"a": 1.5}}

    def study(path: Path) -> Any:
        return read_made(path.parent)

    def overhead(path: Path) -> Any:
        return load_overhead(path.parent)

    def sketch(path: Path) -> Any:
        return load_sketch(path.parent.parent, "bert-0")

    yield Reader("study", "study.json", (json.dumps(made).encode(),), study)
    cost = {"low": -0.1, "middle": 0.0, "high": 0.1}
    one = {"setting": "a", "pairs": 2, "block_s": 1.0, "step_s": 0.1, "time": cost, "time_median": cost}
    one |= {"energy": {"gpu:0": cost}, "core_share": 0.1, "hardware": "x", "remarks": ["y"], "blocks": []}
    whole = json.dumps({"format_version": 1, "settings": {"a": one}}).encode()
    yield Reader("overhead", "overhead.json", (whole,), overhead)
    power = {"of": "step", "count": 2, "edges_s": [0.0, 0.1, 0.2], "mean_w": [5.0, None], "std_w": [1, 2]}
    ran = {"layer": "net", "spans_s": [[[0.0, 0.1]]], "others": ["x"], "others_s": [[[0.1, 0.2]]]}
    drawn = {"format_version": 1, "device": "gpu:0", "edges": [["a", "b"]], "power": power, "ran": ran}
    footprint = _saved(_footprint(), "parquet")

    def readings(folder: Path) -> None:
        for which in ("all", "half"):
            _put(folder / f"sketches/bert-0-{which}.parquet", footprint)

    whole = json.dumps(drawn).encode()
    yield Reader("sketch", "sketches/bert-0.json", (whole,), sketch, 1, readings)
    result = {"format_version": 1, **vars(made_study.one(made_study.Model(layers=1)))}
    del result["step"]

    def step(folder: Path) -> None:
        _put(folder / "results/bert-0.parquet", footprint)

    whole = json.dumps(result).encode()
    yield Reader("result", "results/bert-0.json", (whole,), load_result, 1, step)


# What a run leaves before its trace is read


def _raw_traces() -> Iterator[Reader]:
    begin_ns = NOW_NS // 1000 * 1000
    times = {"asked_ns": begin_ns, "begin_ns": begin_ns, "end_ns": begin_ns + MS, "stopped_ns": begin_ns + MS}
    meta = {"framework": "torch", "format": "kineto", "suffix": ".json", "rank": 0, "pid": 7, **times}
    meta |= {"resumed_ns": begin_ns + MS, "source": "torch", "steps": [[0, begin_ns, begin_ns + MS]]}

    def read(path: Path) -> Any:
        for name in ("events", "edges", "windows"):
            (path.parent.parent / f"{name}.arrows").unlink(missing_ok=True)
        return assemble(path.parent.parent, keep=True)

    def beside(suffix: str, content: bytes) -> Callable[[Path], None]:
        return lambda folder: _put(folder / f"traces/torch-7-0{suffix}", content)

    kineto = json.dumps(_kineto()).encode()
    yield Reader(
        "trace meta",
        "traces/torch-7-0.meta.json",
        (json.dumps(meta).encode(),),
        read,
        1,
        beside(".json", kineto),
    )
    of = {
        "kineto": (".json", kineto),
        "xplane": (".xplane.pb", _xplane()),
        "step_stats": (".pb", _step_stats()),
    }
    for format_, (suffix, whole) in of.items():
        told = json.dumps({**meta, "format": format_, "suffix": suffix}).encode()
        yield Reader(
            f"trace {format_}", f"traces/torch-7-0{suffix}", (whole,), read, 1, beside(".meta.json", told)
        )
    lines = [
        {"t_ns": NOW_NS + n, "name": "step_end", "index": n, "rank": 0, "pid": 7, "source": "a"}
        for n in range(4)
    ]
    spool = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()

    def marks(path: Path) -> Any:
        return is_spoilt(path), read_spool(path.parent.parent)

    yield Reader("spool", "spool/marks-7.jsonl", (spool,), marks)


def _step_stats() -> bytes:
    message = step_stats.message_class()()
    run = message.runs.add()
    stats = run.dev_stats.add(device="/job:localhost/replica:0/task:0/device:CPU:0")
    stats.node_stats.add(
        node_name="net/MatMul", all_start_nanos=NOW_NS, op_start_rel_nanos=5, op_end_rel_nanos=5000
    )
    return message.SerializeToString(deterministic=True)


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def sound(reader: Reader, folder: Path) -> Sequence[Any]:
    """What it makes of the whole files: none may be refused."""
    if reader.around is not None:
        reader.around(folder)
    found: list[Any] = []
    for whole in reader.whole:
        _put(folder / reader.file, whole)
        found.append(reader.read(folder / reader.file))
    return found
