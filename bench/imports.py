"""Measures what it costs to start: `import smaragdine` and `smaragdine --help` against `import numpy`.

    python bench/imports.py [--rounds 15]

Each round runs all commands in turn. The start of the bare interpreter is subtracted from imports.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from smaragdine.stats import ratio_interval

COMMANDS = {
    "bare": ["-c", "pass"],
    "numpy": ["-c", "import numpy"],
    "smaragdine": ["-c", "import smaragdine"],
    "mark": ["-c", "import smaragdine; smaragdine.mark"],
    "help": ["-m", "smaragdine", "--help"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for i in range(rounds + 1):
        for name, words in COMMANDS.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
            if i:  # the first round only fills the page cache
                times[name].append(time.perf_counter() - begin)
    above = {
        name: [max(t - b, 1e-4) for t, b in zip(times[name], times["bare"], strict=True)] for name in times
    }
    print(f"{'':46} {'middle':>7} {'95 % interval':>16}")
    for label, numerator, denominator in (
        ("import smaragdine ÷ import numpy", above["smaragdine"], above["numpy"]),
        ("smaragdine.mark ready ÷ import numpy", above["mark"], above["numpy"]),
        ("smaragdine --help ÷ import numpy", above["help"], above["numpy"]),
        ("the same, interpreter start included in both", times["help"], times["numpy"]),
    ):
        low, middle, high = ratio_interval(numerator, denominator)
        print(f"{label:46} {middle:7.2f} {low:7.2f} … {high:.2f}")


if __name__ == "__main__":
    main()
