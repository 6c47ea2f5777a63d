"""Measures how far calibrated rows are off, and how often their 95 % intervals cover the truth.

    python bench/calibrated.py [--programs 60]

The operations of the programs have a known power (bench/programs.py; every fourth has two streams), and a
sensor sees means over 5, 20 and 100 ms. Replays are off as replays are: each by its own 3 %, all of a card
together by 2 %, and one call in ten cannot be made again. Beside calibrated rows stand equal shares.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from programs import IDLE_W, LIMIT_W, Program, make_program, watch

from smaragdine.accounting.account import account_meters, event_energies_j
from smaragdine.accounting.calibrated import Calibration, CallPower
from smaragdine.accounting.device_power import DevicePower, DevicePowers
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.intervals import grouped
from smaragdine.accounting.power import PowerTrace
from smaragdine.accounting.uncertainty import sensor_of
from smaragdine.arrays import Floats, Ints

WINDOWS_MS = (5, 20, 100)
EACH, TOGETHER, MISSING = 0.03, 0.02, 0.1
SPREAD = 0.01  # what two halves of a replay differ by


@dataclass(frozen=True)
class Rows:
    """Of all programs, relative to the true energy."""

    error: Floats
    width: Floats
    energy_j: Floats

    def line(self) -> str:
        off, covered = np.abs(self.error), np.abs(self.error) <= self.width
        error, width, by_energy = (
            float(np.average(each, weights=self.energy_j)) for each in (off, self.width, covered)
        )
        return f"{error:>8.1%} {width:>8.1%} {covered.mean():>8.1%} {by_energy:>10.1%}"


def operations(program: Program) -> Ints:
    return np.array([int(name[2:]) for name in program.events["name"].cast(pa.string()).to_pylist()])


def true_above_w(program: Program, op: Ints) -> Floats:
    """What each operation draws above idle, from its true energy."""
    start_ns = program.events["start_ns"].to_numpy()
    length_ns = program.events["duration_ns"].to_numpy()
    first_ns, last_ns = int(start_ns.min()), int((start_ns + length_ns).max())
    one_watt = PowerTrace(np.array([first_ns]), np.array([last_ns]), np.ones(1), hold_ns=last_ns - first_ns)
    share_s = event_energies_j(
        program.events, DevicePowers({"gpu:0": DevicePower(one_watt, sensor_of(one_watt))})
    )
    count = program.true_j.size
    shares_s, busy_s = (np.bincount(op, each, minlength=count) for each in (share_s, length_ns * 1e-9))
    return (program.true_j - IDLE_W * shares_s) / busy_s


def replayed(program: Program, op: Ints, seed: int) -> Calibration:
    random = np.random.default_rng(seed + 1000)
    above_w = true_above_w(program, op)
    above_w = above_w * random.normal(1, EACH, above_w.size) * random.normal(1, TOGETHER)
    there = random.random(above_w.size) >= MISSING
    there[np.argmax(program.true_j)] = True  # the largest come first
    calls = {i: CallPower(IDLE_W + max(w, 0.0), SPREAD) for i, w in enumerate(above_w.tolist()) if there[i]}
    return Calibration(calls, IDLE_W)


def compared(found: Footprint, true_j: Floats) -> list[tuple[float, float, float]]:
    """Error, half-width and true energy of every row, relative to it."""
    rows = found.device_rows("gpu:0").to_pylist()
    named = [(row, float(true_j[int(row["name"].rpartition("op")[2])])) for row in rows]
    return [((row["energy_j"] - j) / j, row["uncertainty_j"] / j, j) for row, j in named]


def rows_of(lines: list[tuple[float, float, float]]) -> Rows:
    return Rows(*np.array(lines).T)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=60)
    options = parser.parse_args()
    print(
        f"{options.programs} programs; energy-weighted error and half-width, coverage by row and by energy\n"
    )
    print(f"{'window':>8}  {'rows':<14}{'error':>8} {'width':>8} {'covered':>8} {'by energy':>10}")
    for window_ms in WINDOWS_MS:
        plain: list[tuple[float, float, float]] = []
        calibrated: list[tuple[float, float, float]] = []
        whole: list[tuple[float, float, float]] = []
        for seed in range(options.programs):
            program = make_program(seed)
            op = operations(program)
            events = program.events.append_column("call", pa.array(op, pa.int64()))
            trace = watch(program, window_ms, seed)
            sensor = sensor_of(trace, IDLE_W, LIMIT_W)
            meter = DevicePower(trace, sensor, idle_w=IDLE_W)
            known = DevicePower(trace, sensor, idle_w=IDLE_W, calibration=replayed(program, op, seed))
            plain += compared(account_meters(events, DevicePowers({"gpu:0": meter})), program.true_j)
            found = account_meters(events, DevicePowers({"gpu:0": known}))
            assert any("rows rest on calibration" in remark for remark in found.remarks)
            calibrated += compared(found, program.true_j)
            (one,) = grouped(found, "phase").device_rows("gpu:0").to_pylist()
            all_j = float(program.true_j.sum())
            whole.append(((one["energy_j"] - all_j) / all_j, one["uncertainty_j"] / all_j, all_j))
        for name, lines in (("equal shares", plain), ("calibrated", calibrated), ("the whole", whole)):
            print(f"{window_ms:>5} ms  {name:<14}{rows_of(lines).line()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
