"""Measures how far calibrated rows are off, and how often their 95 % intervals cover the truth.

    python bench/calibrated.py [--programs 60]

Programs run on a simulated card (tests/simulated_card.py) whose truth is known, and are recorded. The code
that ships replays their calls on it, in the card's own time, and accounts the recording. Beside calibrated
rows stand equal shares, and replays back to back with hot inputs and no look at the clock.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from simulated_calibration import (
    CALIBRATED,
    EQUAL,
    LIMITED,
    NAIVE,
    ONE,
    TWO,
    Figures,
    judge,
)

WINDOWS_MS = (20, 100)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--windows", type=int, nargs="+", default=WINDOWS_MS, help="in ms")
    options = parser.parse_args()
    print(
        f"{options.programs} programs; energy-weighted error and half-width, coverage by row and by energy\n"
    )
    print(f"{'window':>8}  {'rows':<34}{'error':>8} {'width':>8} {'covered':>8} {'by energy':>10}")
    for window_ms in options.windows:
        with tempfile.TemporaryDirectory() as folder:
            found = [judge(Path(folder) / str(seed), seed, window_ms) for seed in range(options.programs)]
        for name in (EQUAL, NAIVE, CALIBRATED):
            figures = Figures.of([row for each in found for row in each.rows[name]])
            print(f"{window_ms:>5} ms  {name:<34}{figures}", flush=True)
        for kind in (ONE, TWO, LIMITED):
            some = [each for each in found if each.kind == kind]
            if some:
                figures = Figures.of([row for each in some for row in each.rows[CALIBRATED]])
                print(f"{window_ms:>5} ms  {f'  {kind}: {len(some)}':<34}{figures}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
