"""What tracing costs and explains: a training with and without it, in turn.

    python bench/tracing.py [--rounds 2] [--trace-steps 20] [--program bench/bert_jax.py] [its options]

The program writes its steps' times with --json (see bert_torch.py, bert_jax.py). On a CPU give it something
small: --steps 200 --layers 2 --hidden 64 --batch 4 --length 32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute

import smaragdine
from smaragdine.accounting.overview import Overview, overview

pc: Any = pyarrow.compute


def run(program: Sequence[str], folder: Path, options: Sequence[str]) -> list[tuple[int, int]]:
    """Beginning and end of each step, unix ns."""
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
    """Lengths, ms, of steps that the profiler did not touch; the first ones compile and allocate."""
    windows = recording.windows.to_pylist()
    return [
        (end - begin) * 1e-6
        for begin, end in steps[5:]
        if not any(begin <= window["stopped_ns"] and end >= window["asked_ns"] for window in windows)
    ]


def unplaced(recording: smaragdine.Recording, kind: str) -> float | None:
    """The part of the time of all events on such devices that has no place."""
    events = recording.events
    there = events.filter(pc.starts_with(events["device"].cast("string"), kind))
    if not there.num_rows:
        return None
    lost = there.filter(pc.starts_with(there["name"].cast("string"), "unplaced"))
    return sum(lost["duration_ns"].to_pylist()) / sum(there["duration_ns"].to_pylist())


def line(name: str, steps: Sequence[tuple[int, int]], folder: Path, found: Overview | None) -> str:
    recording = smaragdine.open(folder)
    plain = apart(steps, recording)
    whole_s = (steps[-1][1] - steps[5][0]) * 1e-9
    text = f"{name:8} {whole_s:9.2f} {statistics.median(plain):12.2f}"
    if found is None or found.steps is None:
        return text
    traced = found.steps
    placed = [f"{1 - part:.2%}" for kind in ("gpu", "cpu") if (part := unplaced(recording, kind)) is not None]
    factors = [
        f"{step.factor:.3f}" for d, step in found.untraced.items() if step.factor and d.startswith("gpu")
    ]
    return (
        f"{text} {traced.traced_s * 1e3:10.2f} {traced.paused_s:14.2f}  {' / '.join(placed):17}"
        f" {' '.join(factors)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trace-steps", type=int, default=20)
    parser.add_argument("--program", default=str(Path(__file__).with_name("bert_torch.py")))
    options, rest = parser.parse_known_args()
    print("                  untraced     traced      start & stop  placed             untraced ÷ traced")
    print(
        "run       5…end s  step ms      step ms     profiler, s    GPU / CPU          energy of operations"
    )
    with tempfile.TemporaryDirectory() as folder:
        for i in range(options.rounds):
            for name, flags in (
                ("off", ["--trace", "off"]),
                ("traced", ["--trace-steps", str(options.trace_steps)]),
            ):
                where = Path(folder) / f"{name}-{i}"
                steps = run([options.program, *rest], where, flags)
                found = overview(smaragdine.open(where)) if name == "traced" else None
                print(line(name, steps, where, found), flush=True)


if __name__ == "__main__":
    main()
