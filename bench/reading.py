"""Measures what it costs to read events: Chrome JSON (as Kineto writes it), gzipped too, XPlane and Parquet.

    python bench/reading.py [--events 1000000] [--rounds 3]

Each round reads every file once. The ratio is to `json.load` of the Chrome JSON in the same round.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from smaragdine.protobuf import message_class
from smaragdine.stats import ratio_interval
from smaragdine.tracing.files import read_events

BASE_NS = 1_790_857_026_000_000_000
KERNEL = (
    '"queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": %d, "registers per thread": 16, '
    '"shared memory": 0, "blocks per SM": 0.02, "grid": [1, 1, 1], "block": [128, 1, 1]'
)
OPERATOR = '"Record function id": 0, "Sequence number": %d, "Fwd thread id": 0, "Ev Idx": 1'


def write_kineto(path: Path, count: int) -> None:
    """Two operators for each kernel, seven microseconds apart; a step every ten thousand."""
    with path.open("w") as out:
        out.write(f'{{"schemaVersion": 1, "baseTimeNanoseconds": {BASE_NS}, "traceEvents": [\n')
        for i in range(count):
            t_ns = 3_883_364_025_137_868 + i * 7_013
            when = f'"ts": {t_ns // 1000}.{t_ns % 1000:03d}, "dur": 5.{i % 1000:03d}'
            if i % 10_000 == 0:
                step = f'"name": "ProfilerStep#{i // 10_000}", "pid": 40, "tid": 40, "dur": 70000'
                out.write(f'{{"ph": "X", "cat": "user_annotation", {step}, "ts": {t_ns // 1000}}},\n')
            if i % 3 == 2:
                head = f'"cat": "kernel", "name": "ampere_sgemm_{i % 200}", "pid": 0, "tid": 7'
                args = f'"External id": {i - 1}, ' + KERNEL % i
            else:
                head = f'"cat": "cpu_op", "name": "aten::op_{i % 200}", "pid": 40, "tid": 40'
                args = f'"External id": {i}, ' + OPERATOR % i
            out.write(f'{{"ph": "X", {head}, {when}, "args": {{{args}}}}}{"," if i < count - 1 else ""}\n')
        out.write("]}\n")


def write_xplane(path: Path, count: int) -> None:
    """Half TensorFlow operations on four host lines, half kernels with their path on two streams."""
    space = message_class()()
    task = space.planes.add(name="Task Environment")
    task.stat_metadata[1].name = "profile_start_time"
    task.stats.add(metadata_id=1, uint64_value=BASE_NS)
    for name, lines in (("/host:CPU", 4), ("/device:GPU:0", 2)):
        plane = space.planes.add(name=name)
        for key in range(1, 201):
            plane.event_metadata[key].name = f"model/layer_{key}/MatMul:MatMul"
            plane.stat_metadata[key].name = f"jit(step)/jvp(Bert)/layer_{key}/dot_general"
        plane.stat_metadata[201].name, plane.stat_metadata[202].name = "hlo_op", "name"
        for number in range(lines):
            line = plane.lines.add(
                name=f"tf_Compute/{number}" if lines == 4 else f"Stream #{number}", id=number
            )
            for i in range(count // 2 // lines):
                event = line.events.add(
                    metadata_id=i % 200 + 1, offset_ps=i * 7_013_000, duration_ps=5_000_000
                )
                if lines == 2:
                    event.stats.add(metadata_id=201, ref_value=i % 200 + 1)
                    event.stats.add(metadata_id=202, ref_value=i % 200 + 1)
    path.write_bytes(space.SerializeToString())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = {
            name: Path(folder, name)
            for name in ("trace.json", "trace.json.gz", "host.xplane.pb", "e.parquet")
        }
        write_kineto(files["trace.json"], options.events)
        files["trace.json.gz"].write_bytes(gzip.compress(files["trace.json"].read_bytes(), 1))
        write_xplane(files["host.xplane.pb"], options.events)
        pq.write_table(read_events(files["trace.json"]), files["e.parquet"])
        times: dict[str, list[float]] = {name: [] for name in ("json.load", *files)}
        for _ in range(options.rounds):
            gc.collect()
            begin = time.perf_counter()
            with files["trace.json"].open("rb") as source:
                json.load(source)
            times["json.load"].append(time.perf_counter() - begin)
            for name, path in files.items():
                gc.collect()
                begin = time.perf_counter()
                rows = read_events(path).num_rows
                times[name].append(time.perf_counter() - begin)
                assert abs(rows - options.events) <= 8, rows
        print(f"{'':16} {'MB':>6} {'s':>7} {'µs/event':>9} {'÷ json.load':>12} {'lowest … highest':>18}")
        for name, seconds in times.items():
            size = files.get(name, files["trace.json"]).stat().st_size / 1e6
            _, middle, _ = ratio_interval(seconds, times["json.load"])
            ratios = [a / b for a, b in zip(seconds, times["json.load"], strict=True)]
            low, high = min(ratios), max(ratios)  # too few rounds for an interval
            each = statistics.median(seconds) / options.events * 1e6
            print(
                f"{name:16} {size:6.0f} {statistics.median(seconds):7.2f} {each:9.2f} "
                f"{middle:12.3f} {low:10.3f} … {high:.3f}"
            )


if __name__ == "__main__":
    main()
