"""Measures what tracing costs and explains: a training with and without it, in turn.

    python bench/tracing.py [--rounds 2] [--trace-steps 20] [--program bench/bert_jax.py] [its options]

*Beyond* is how much longer the run took than its steps, with traced steps as they were and all others at
their median. It is not zero without tracing either, because steps vary. The rest is what starting, stopping
and writing cost.

The program writes its steps' times with --json (see bert_torch.py, bert_jax.py). On a CPU give it something
small: --steps 200 --layers 2 --hidden 64 --batch 4 --length 32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import smaragdine
from smaragdine.accounting.run import Run
from smaragdine.accounting.spans import resumed_ns
from smaragdine.arrow import pc


def run(program: Sequence[str], folder: Path, options: Sequence[str]) -> list[tuple[int, int]]:
    """Beginning and end of each step, in Unix nanoseconds."""
    times = folder.with_suffix(".json")
    command = [sys.executable, "-m", "smaragdine", "run", "-o", str(folder), *options, *program]
    done = subprocess.run([*command, "--json", str(times)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    values = json.loads(times.read_text())
    if "steps" in values:
        return [(begin, end) for begin, end in values["steps"]]
    ends = values["step_end_ns"]
    return list(zip([values["begin_ns"], *ends[:-1]], ends, strict=True))


def apart(steps: Sequence[tuple[int, int]], recording: smaragdine.Recording) -> list[float]:
    """Lengths, in ms, of steps that the profiler did not touch, without the first ones, which compile."""
    windows = recording.windows.to_pylist()
    return [
        (end - begin) * 1e-6
        for begin, end in steps[5:]
        if not any(begin <= window["stopped_ns"] and end >= window["asked_ns"] for window in windows)
    ]


def unplaced(recording: smaragdine.Recording, kind: str) -> float | None:
    """The part of the time of all events on these devices that is `unplaced`."""
    events = recording.events
    there = events.filter(pc.starts_with(events["device"].cast("string"), kind))
    if not there.num_rows:
        return None
    lost = there.filter(pc.starts_with(there["name"].cast("string"), "unplaced"))
    return sum(lost["duration_ns"].to_pylist()) / sum(there["duration_ns"].to_pylist())


def beyond(steps: Sequence[tuple[int, int]], recording: smaragdine.Recording, median_ms: float) -> float:
    """What is left of the run without all its steps, as a part of the run."""
    traced = [step for window in recording.windows.to_pylist() for step in window["steps"]]
    traced_s = sum(step["end_ns"] - step["begin_ns"] for step in traced) * 1e-9
    plain_s = (len(steps) - 5 - len(traced)) * median_ms * 1e-3
    whole_s = (steps[-1][1] - steps[5][0]) * 1e-9
    return (whole_s - traced_s - plain_s) / whole_s


def meanwhile(steps: Sequence[tuple[int, int]], recording: smaragdine.Recording) -> str:
    """Steps during which a trace was written: how many, and their median."""
    spans = [(resumed_ns(w), w["stopped_ns"]) for w in recording.windows.to_pylist()]
    found = [(b - a) * 1e-6 for a, b in steps if any(a < end and b > begin for begin, end in spans)]
    return f"{len(found)} × {statistics.median(found):.1f}" if found else "–"


def line(name: str, steps: Sequence[tuple[int, int]], folder: Path, found: Run | None) -> str:
    recording = smaragdine.open(folder)
    median_ms = statistics.median(apart(steps, recording))
    whole_s = (steps[-1][1] - steps[5][0]) * 1e-9
    text = f"{name:8} {whole_s:9.2f} {median_ms:12.2f} {beyond(steps, recording, median_ms):8.2%}"
    if found is None or found.steps is None:
        return text
    traced = found.steps
    windows = recording.windows.to_pylist()
    start_s = sum(window["begin_ns"] - window["asked_ns"] for window in windows) * 1e-9
    placed = [f"{1 - part:.2%}" for kind in ("gpu", "cpu") if (part := unplaced(recording, kind)) is not None]
    factors = [
        f"{step.factor:.3f}" for d, step in found.untraced.items() if step.factor and d.startswith("gpu")
    ]
    return (
        f"{text} {traced.traced_s * 1e3:10.2f} {start_s:8.3f} {traced.paused_s - start_s:8.3f}"
        f" {meanwhile(steps, recording):>12}  {' / '.join(placed):17} {' '.join(factors)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trace-steps", type=int, default=20)
    parser.add_argument("--keep", metavar="DIR", help="keep the recordings in this folder")
    parser.add_argument("--program", default=str(Path(__file__).with_name("bert_torch.py")))
    options, rest = parser.parse_known_args()
    print(
        "                       untraced            traced  profiler's…    steps while  placed             "
        "untraced ÷ traced"
    )
    print(
        "run        5…end s      step ms   beyond  step ms  start s   stop s  written, ms  GPU / CPU       "
        "   energy of operations"
    )
    with contextlib.ExitStack() as stack:
        folder = options.keep or stack.enter_context(tempfile.TemporaryDirectory())
        Path(folder).mkdir(parents=True, exist_ok=True)
        for i in range(options.rounds):
            for name, flags in (
                ("off", ["--trace", "off"]),
                ("traced", ["--trace-steps", str(options.trace_steps)]),
            ):
                where = Path(folder) / f"{name}-{i}"
                steps = run([options.program, *rest], where, flags)
                found = Run.open(where) if name == "traced" else None
                print(line(name, steps, where, found), flush=True)


if __name__ == "__main__":
    main()
