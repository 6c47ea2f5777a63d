"""How often a row's 95 % interval covers its true energy, and how wide it is.

    python bench/intervals.py [--programs 60]

On programs whose operations have a known power (bench/programs.py), seen by a sensor that gives means over 5,
20 and 100 ms. Beside our interval the one that a mean over steps alone would give.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from programs import IDLE_W, LIMIT_W, make_program, watch

from smaragdine.accounting.account import account
from smaragdine.accounting.meters import Meter
from smaragdine.accounting.student import t_quantile
from smaragdine.accounting.uncertainty import sensor_of

WINDOWS_MS = (5, 20, 100)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """One line per row of all programs, all relative to the row's true energy."""

    error: Floats
    width: Floats
    spread: Floats  # the half-width from the spread over steps alone
    energy_j: Floats
    by_prior: npt.NDArray[np.bool_]


def watch_programs(programs: int, window_ms: float, limits_known: bool) -> Outcome:
    lines: list[tuple[float, float, float, float, bool]] = []
    for seed in range(programs):
        program = make_program(seed)
        trace = watch(program, window_ms, seed)
        known = (IDLE_W, LIMIT_W) if limits_known else (None, None)
        found = account(program.events, {"gpu:0": Meter(trace, sensor_of(trace, *known))})
        steps = found.devices["gpu:0"].steps
        for row in found.rows.to_pylist():
            true_j = float(program.true_j[int(row["name"][2:])])
            spread_j = t_quantile(steps - 1) * row["step_std_j"] * steps**0.5
            lines.append(
                (
                    abs(row["energy_j"] - true_j) / true_j,
                    row["uncertainty_j"] / true_j,
                    spread_j / true_j,
                    true_j,
                    row["basis"] == "prior",
                )
            )
    error, width, spread, energy_j, by_prior = (np.array(column) for column in zip(*lines, strict=True))
    return Outcome(error, width, spread, energy_j, by_prior)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=60)
    programs = parser.parse_args().programs
    print(
        "window  limits    rows  covered  by spread alone  median width  by energy  median error  on a prior"
    )
    for window_ms in WINDOWS_MS:
        for limits_known in (True, False):
            if sys.stderr.isatty():
                print(f"  {window_ms} ms …", end="\r", file=sys.stderr)
            seen = watch_programs(programs, window_ms, limits_known)
            print(
                f"{window_ms:3} ms  {'known' if limits_known else 'guessed':8}{seen.error.size:6}"
                f"{np.mean(seen.error <= seen.width):9.1%}{np.mean(seen.error <= seen.spread):17.1%}"
                f"{np.median(seen.width):14.1%}{np.average(seen.width, weights=seen.energy_j):11.1%}"
                f"{np.median(seen.error):14.1%}{np.mean(seen.by_prior):12.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
