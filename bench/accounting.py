"""Events × power → footprint: events a second, memory, and the time of a plain sort beside it.

    python bench/accounting.py [--sizes 1e5,1e6,1e7,1e8] [--rounds 3]

Events of 8 lanes, 1.5 to 15 µs long, 500 names, under 20 ms power samples: *near-sorted* as a profiler
writes them (by their ends), and shuffled. Beside each stands, from the same round, `np.sort(kind="stable")`
of the events' 2N boundaries, shuffled; and for small sizes Algorithm 2 of the paper, literally. Every
measurement is a process of its own, so that the highest memory it ever held (above what held the input) is
its own too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa

LANES, NAMES, SAMPLE_NS = 8, 500, 20_000_000
T0_NS = 1_800_000_000_000_000_000
LITERAL_MOST = 20_000  # Algorithm 2 visits every instant of every event; we let it visit microseconds only
MB = 1e6


def make_events(count: int, shuffled: bool) -> pa.Table:
    """`count` events in 8 lanes, without overlap inside a lane."""
    from smaragdine.recording.format import EVENTS

    random = np.random.default_rng(1)
    duration_ns = random.integers(1_500, 15_000, count)
    start_ns = np.empty(count, dtype=np.int64)
    for lane in range(LANES):
        # Event i is in lane i mod 8: each lane's events one after the other, with short pauses.
        mine = duration_ns[lane::LANES]
        ends_ns = np.cumsum(mine + random.integers(0, 1_000, mine.size))
        start_ns[lane::LANES] = T0_NS + ends_ns - mine
        del mine, ends_ns
    # By the end, as profilers write; the lanes drift apart, so that a global order must be made.
    order = random.permutation(count) if shuffled else np.argsort(start_ns + duration_ns, kind="stable")
    columns: dict[str, Any] = {"start_ns": start_ns[order], "duration_ns": duration_ns[order]}
    lane = (np.arange(count) % LANES)[order]
    del order, start_ns, duration_ns
    text = pa.dictionary(pa.int32(), pa.string())
    names = pa.array(random.integers(0, NAMES, count, dtype=np.int32))
    columns["name"] = pa.DictionaryArray.from_arrays(names, [f"layer_{i % 12}/op{i}" for i in range(NAMES)])
    columns["device"] = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, dtype=np.int32)), ["gpu:0"])
    columns |= {"phase": pa.nulls(count, text), "lane": lane, "step": pa.nulls(count, pa.int64())}
    return pa.table({name: columns[name] for name in EVENTS.names}, schema=EVENTS)


def make_power(until_ns: int) -> Any:
    from smaragdine.accounting.power import PowerTrace

    start_ns = np.arange(T0_NS, until_ns, SAMPLE_NS)
    power_w = np.random.default_rng(2).uniform(100, 700, start_ns.size)
    return PowerTrace(start_ns, start_ns + SAMPLE_NS, power_w)


def measure_account(count: int, shuffled: bool, compiled: bool = True) -> dict[str, float]:
    from smaragdine.accounting import account as module
    from smaragdine.accounting.account import account
    from smaragdine.accounting.integral import compiled_sweep

    events = make_events(count, shuffled)
    last_ns = int(events["start_ns"].to_numpy()[-min(count, 64 * LANES) :].max()) if not shuffled else None
    power = make_power((last_ns or int(events["start_ns"].to_numpy().max())) + 20_000)
    # What is paid once a process is not the engine's: imports, and loading the compiled loop (some 0.4 s).
    module.sweep_for = lambda _: compiled_sweep() if compiled else None
    module.sweep_for(0)
    account(events.slice(0, 1000), {"gpu:0": power})
    reset_peak()
    held = peak_bytes()
    begin = time.perf_counter()
    found = account(events, {"gpu:0": power})
    seconds = time.perf_counter() - begin
    total = found.devices["gpu:0"]
    rows_j = float(found.rows["energy_j"].to_numpy().sum())
    return {
        "seconds": seconds,
        "peak_bytes": peak_bytes() - held,
        "input_bytes": events.nbytes,
        "off": abs(rows_j + total.idle_j - total.total_j) / total.total_j,
    }


def measure_sort(count: int) -> dict[str, float]:
    events = make_events(count, False)
    start_ns = events["start_ns"].to_numpy()
    boundaries = np.concatenate([start_ns, start_ns + events["duration_ns"].to_numpy()])
    del events, start_ns
    np.random.default_rng(3).shuffle(boundaries)
    begin = time.perf_counter()
    np.sort(boundaries, kind="stable")
    return {"seconds": time.perf_counter() - begin}


def measure_literal(count: int) -> dict[str, float]:
    """Algorithm 2 as printed, on a clock of microseconds: flatten, then share instant by instant."""
    events = make_events(count, False)
    trace = make_power(int(events["start_ns"].to_numpy().max()) + 20_000)
    readings = {int(t) // 1000: float(p) for t, p in zip(trace.start_ns, trace.power_w, strict=True)}
    rows = [
        (row["name"], row["start_ns"] // 1000, row["duration_ns"] // 1000)
        for row in events.select(["name", "start_ns", "duration_ns"]).to_pylist()
    ]
    begin = time.perf_counter()
    flat: dict[int, set[str]] = defaultdict(set)
    for name, start, duration in rows:
        for t in range(start, start + duration + 1):
            flat[t].add(name)
    found: dict[str, float] = defaultdict(float)
    times = sorted(readings)
    for t, names in flat.items():
        latest = max(time for time in times if time <= t)  # NOW of Algorithm 1
        for name in names:
            found[name] += readings[latest] / len(names)
    return {"seconds": time.perf_counter() - begin}


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def in_process(what: str, count: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--measure", what, "--count", str(count)],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return json.loads(done.stdout)


MEASURES: dict[str, Any] = {
    "near-sorted": lambda count: measure_account(count, False),
    "shuffled": lambda count: measure_account(count, True),
    "… numpy": lambda count: measure_account(count, False, compiled=False),
    "np.sort": measure_sort,
    "algorithm 2": measure_literal,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1e5,1e6,1e7,1e8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(MEASURES[options.measure](options.count)))
        return
    from smaragdine.accounting.integral import compiled_sweep

    print(f"inner loop: {'compiled (numba)' if compiled_sweep() else 'numpy alone'}")
    print(f"{'events':>11} {'order':12} {'ns an event':>24} {'events a second':>16} {'÷ np.sort of 2N':>24}"
          f" {'peak':>9} {'input':>9}")  # fmt: skip
    for count in [LITERAL_MOST, *(int(float(size)) for size in options.sizes.split(","))]:
        orders = ["near-sorted", "… numpy", "shuffled", *(["algorithm 2"] if count <= LITERAL_MOST else [])]
        # In turns, so that the machine's mood meets all of them.
        rounds = [
            {what: in_process(what, count) for what in (*orders, "np.sort")} for _ in range(options.rounds)
        ]
        for order in orders:
            report(count, order, rounds)


def report(count: int, order: str, rounds: list[dict[str, dict[str, float]]]) -> None:
    seconds = sorted(each[order]["seconds"] for each in rounds)
    ratios = sorted(each[order]["seconds"] / each["np.sort"]["seconds"] for each in rounds)
    middle = seconds[len(seconds) // 2]
    each_ns = f"{middle / count * 1e9:.1f} ({seconds[0] / count * 1e9:.1f} … {seconds[-1] / count * 1e9:.1f})"
    ratio = f"{ratios[len(ratios) // 2]:.3f} ({ratios[0]:.3f} … {ratios[-1]:.3f})"
    line = f"{count:11,} {order:12} {each_ns:>24} {count / middle:16,.0f} {ratio:>24}"
    if order != "algorithm 2":
        peak = max(each[order]["peak_bytes"] for each in rounds)
        line += f" {peak / MB:6.0f} MB {rounds[0][order]['input_bytes'] / MB:6.0f} MB"
    print(line, flush=True)


if __name__ == "__main__":
    main()
