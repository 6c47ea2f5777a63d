"""Measures whether energy comes out right: square-wave loads on a real GPU, each route against the counter.

    python bench/square_wave.py [--seconds 40] [--out DIR]

It needs an NVIDIA GPU and PyTorch, and changes no setting of the card. `smaragdine run` records each load.
Beside it, a second process polls the instant and the average power every 4 ms, as other tools do.

The truth for "while on" and "while off" comes from the counter alone: two runs of the same period and
different duty give two equations for the two powers.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LOADS = ((100, 0.5), (100, 0.25), (50, 0.5), (200, 0.5), (20, 0.5))
COMPANIONS = ((50, 0.25), (200, 0.25), (20, 0.25))
WARM_UP_S = 3.0


# ---- the load: a program like any other ---------------------------------------------------------------


def load(period_ms: float, duty: float, seconds: float, log: str) -> None:
    """Matrix products while (wall clock mod period) < duty × period, nothing otherwise; edges are logged."""
    import torch

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    c = torch.empty_like(a)
    for _ in range(10):
        torch.mm(a, b, out=c)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            torch.mm(a, b, out=c)
    period_ns, on_ns = int(period_ms * 1e6), int(period_ms * 1e6 * duty)
    edges: list[tuple[int, int]] = []
    end_ns = time.time_ns() + int(seconds * 1e9)
    while (now_ns := time.time_ns()) < end_ns:
        phase_ns = now_ns % period_ns
        if phase_ns >= on_ns:
            left_ns = period_ns - phase_ns
            if left_ns > 300_000:
                time.sleep((left_ns - 200_000) * 1e-9)
            continue
        stop_ns = now_ns - phase_ns + on_ns
        begin_ns = time.time_ns()
        while time.time_ns() < stop_ns - 200_000:
            graph.replay()
            torch.cuda.synchronize()
        edges.append((begin_ns, time.time_ns()))
    np.save(log, np.array(edges, dtype=np.int64))


def poll(seconds: float, log: str) -> None:
    """Poll until told to stop, then write the log: time (ns), instant and average power (mW)."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    rows = _poll(seconds, stopped)
    np.save(log, np.array(rows, dtype=np.int64))


def _poll(seconds: float, stopped: list[int]) -> list[tuple[int, int, int]]:
    """What polling tools see: (time, instant, average) every 4 ms, and how long the call took."""
    import pynvml

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    field = pynvml.NVML_FI_DEV_POWER_INSTANT
    rows: list[tuple[int, int, int]] = []
    next_s = time.monotonic()
    end_s = next_s + seconds
    while next_s < end_s and not stopped:
        time.sleep(max(0.0, next_s - time.monotonic()))
        next_s += 0.004
        value = pynvml.nvmlDeviceGetFieldValues(device, [field])[0]
        rows.append((time.time_ns(), value.value.uiVal, pynvml.nvmlDeviceGetPowerUsage(device)))
    return rows


# ---- the measurement ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    folder: Path
    edges: np.ndarray
    polled: np.ndarray


def record(period_ms: float, duty: float, seconds: float, root: Path) -> Run:
    name = f"{period_ms:g}ms-{duty:g}"
    edges, polled = root / f"{name}.edges.npy", root / f"{name}.polled.npy"
    total_s = seconds + WARM_UP_S
    poller = subprocess.Popen([sys.executable, __file__, "--poll", str(total_s + 20), "--log", str(polled)])
    words = ["--load", str(period_ms), str(duty), str(total_s), "--log", str(edges)]
    subprocess.run(
        [sys.executable, "-m", "smaragdine", "run", "-o", str(root / name), __file__, *words],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    poller.terminate()
    poller.wait()
    return Run(root / name, np.load(edges), np.load(polled))


def counter_j(counter: object, start_ns: int, end_ns: int) -> tuple[float, int, int]:
    """The counter's difference between its first and last observed change inside the interval."""
    inside = (counter.t_ns >= start_ns) & (counter.t_ns <= end_ns)
    t_ns, value = counter.t_ns[inside], counter.value[inside]
    return float(value[-1] - value[0]), int(t_ns[0]), int(t_ns[-1])


def held(t_ns: np.ndarray, power_w: np.ndarray, start_ns: int, end_ns: int) -> float:
    """Energy of a polled log, each value held until the next."""
    ends = np.append(t_ns[1:], t_ns[-1])
    length_ns = np.clip(np.minimum(ends, end_ns) - np.maximum(t_ns, start_ns), 0, None)
    return float((power_w * length_ns).sum() * 1e-9)


def analyse(run: Run) -> dict[str, float]:
    from smaragdine.accounting.power import from_samples
    from smaragdine.accounting.traces import anchor
    from smaragdine.recording.reader import Series, open_recording

    recording = open_recording(run.folder)
    series = {s.channel.quantity: s for s in recording.series("power") if s.channel.device == "gpu:0"}
    samples, counter = series["power"], series["energy"]
    begin_ns = int(run.edges[0, 0]) + int(WARM_UP_S * 1e9)
    end_ns = int(run.edges[-1, 1])
    used_j, first_ns, last_ns = counter_j(counter, begin_ns, end_ns)
    shape = from_samples(samples)
    t_ns, instant_w, average_w = run.polled[:, 0], run.polled[:, 1] / 1e3, run.polled[:, 2] / 1e3

    # Held out: anchors are every other observed change, the intervals between the rest are the test.
    inside = np.flatnonzero((counter.t_ns >= begin_ns) & (counter.t_ns <= end_ns))
    apart = [inside[0]]
    for i in inside[1:]:
        if counter.t_ns[i] - counter.t_ns[apart[-1]] >= 0.9e9:
            apart.append(i)
    apart = np.array(apart)
    kept, tested = apart[0::2], apart[1::2]
    anchoring = Series(counter.channel, counter.t_ns[kept], counter.value[kept], counter.segment[kept])
    anchored = anchor(shape, anchoring, every_ns=1)
    tested = tested[
        (counter.t_ns[tested] > counter.t_ns[kept[0]]) & (counter.t_ns[tested] < counter.t_ns[kept[-1]])
    ]
    got_j = np.diff(anchored.energy_until_j(counter.t_ns[tested]))
    true_j = np.diff(counter.value[tested])
    held_out = got_j / true_j - 1

    on = run.edges[(run.edges[:, 0] >= first_ns) & (run.edges[:, 1] <= last_ns)]
    on_j = float((anchored.energy_until_j(on[:, 1]) - anchored.energy_until_j(on[:, 0])).sum())
    on_s = float((on[:, 1] - on[:, 0]).sum()) * 1e-9
    whole = (int(on[0, 0]), int(on[-1, 1]))
    off_j = anchored.energy_j(*whole) - on_j
    off_s = (whole[1] - whole[0]) * 1e-9 - on_s
    monitor = recording.info["monitor"][0]
    return {
        "seconds": (last_ns - first_ns) * 1e-9,
        "counter_j": used_j,
        "mean_w": used_j / ((last_ns - first_ns) * 1e-9),
        "instant_error": held(t_ns, instant_w, first_ns, last_ns) / used_j - 1,
        "average_error": held(t_ns, average_w, first_ns, last_ns) / used_j - 1,
        "samples_error": shape.energy_j(first_ns, last_ns) / used_j - 1,
        "held_out_mean": float(np.abs(held_out).mean()),
        "held_out_worst": float(np.abs(held_out).max()),
        "held_out_bias": float(got_j.sum() / true_j.sum() - 1),
        "held_out_intervals": float(held_out.size),
        "covered": shape.covered_s(first_ns, last_ns) / ((last_ns - first_ns) * 1e-9),
        "on_share": on_s / (on_s + off_s),
        "on_w": on_j / on_s,
        "off_w": off_j / off_s,
        "idle_w": float(np.percentile(samples.value[samples.t_ns < run.edges[0, 0]], 5)),
        "most_w": float(samples.value.max()),
        "window_ms": samples.channel.window_ms or 0.0,
        "spacing_ms": float(np.median(np.diff(samples.t_ns))) / 1e6,
        "counter_period_ms": counter.channel.period_ms,
        "sampler_core": monitor["core_share"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--load", nargs=3, type=float, help=argparse.SUPPRESS)
    parser.add_argument("--poll", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--log", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        return load(*options.load, options.log)
    if options.poll:
        return poll(options.poll, options.log)
    root = options.out or Path(tempfile.mkdtemp())
    root.mkdir(parents=True, exist_ok=True)
    results: dict[tuple[float, float], dict[str, float]] = {}
    for period_ms, duty in (*LOADS, *COMPANIONS):
        seconds = options.seconds if (period_ms, duty) in LOADS else options.seconds / 2
        print(f"recording {period_ms} ms, {duty:.0%} on, {seconds:g} s", file=sys.stderr, flush=True)
        results[period_ms, duty] = analyse(record(period_ms, duty, seconds, root))
    (root / "results.json").write_text(
        json.dumps([{"period_ms": p, "duty": d, **r} for (p, d), r in results.items()], indent=1)
    )
    tables(results)
    return None


def true_powers(
    results: dict[tuple[float, float], dict[str, float]], period_ms: float
) -> tuple[float, float]:
    """Power while on and off by the counter alone: mean = on·share + off·(1 − share), at two shares."""
    rows = [r for (p, _), r in results.items() if p == period_ms]
    shares = np.array([[r["on_share"], 1 - r["on_share"]] for r in rows])
    on_w, off_w = np.linalg.solve(shares, np.array([r["mean_w"] for r in rows]))
    return float(on_w), float(off_w)


def tables(results: dict[tuple[float, float], dict[str, float]]) -> None:
    print("\nenergy against the counter, same run")
    head = ("counter", "instant", "average", "samples", "covered", "sampler")
    print(f"{'load':>14} {' '.join(f'{name:>9}' for name in head)}")
    for (period_ms, duty), r in results.items():
        print(
            f"{period_ms:5g} ms {duty:4.0%} {r['counter_j']:8.0f} J {r['instant_error']:+9.1%} "
            f"{r['average_error']:+9.1%} {r['samples_error']:+9.1%} {r['covered']:9.2%} "
            f"{r['sampler_core']:9.2%}"
        )
    print("\nanchored, on counter intervals held out from anchoring")
    print(f"{'load':>14} {'intervals':>9} {'mean |e|':>9} {'worst':>9} {'bias':>9}")
    for (period_ms, duty), r in results.items():
        print(
            f"{period_ms:5g} ms {duty:4.0%} {r['held_out_intervals']:9.0f} {r['held_out_mean']:9.2%} "
            f"{r['held_out_worst']:9.2%} {r['held_out_bias']:+9.2%}"
        )
    print("\nenergy while on and while off; truth by the counter at two duties")
    print(f"{'load':>14} {'on W':>7} {'true':>7} {'error':>8} {'off W':>7} {'true':>7} {'error':>8}  note")
    for (period_ms, duty), r in results.items():
        on_w, off_w = true_powers(results, period_ms)
        note = ""
        if period_ms < 2 * r["window_ms"]:
            low_w, high_w = r["idle_w"], r["most_w"]
            least = (r["mean_w"] - high_w * (1 - r["on_share"])) / r["on_share"]
            most = (r["mean_w"] - low_w * (1 - r["on_share"])) / r["on_share"]
            note = f"under two windows, cannot be told apart; on is {max(low_w, least):.0f} … {most:.0f} W"
        print(
            f"{period_ms:5g} ms {duty:4.0%} {r['on_w']:7.1f} {on_w:7.1f} {r['on_w'] / on_w - 1:+8.1%} "
            f"{r['off_w']:7.1f} {off_w:7.1f} {r['off_w'] / off_w - 1:+8.1%}  {note}"
        )


if __name__ == "__main__":
    main()
