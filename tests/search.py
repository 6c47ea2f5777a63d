"""Looks for examples that nobody thought of: `make search MINUTES=30`.

`make test` takes the same examples every time, so that a change that breaks nothing stays green. This takes
new ones, round by round, until the minutes are over: every property (Hypothesis) and every fuzzer, the tests
that are marked `search`. It stops at the first failure with the example and how to keep it, exit code 1.

A fuzzer takes its numbers from `seed`:

    dice = random.Random(search.seed(4))
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

SEED_VARIABLE = "SMARAGDINE_SEARCH_SEED"
FAILED = 1  # pytest's exit code
BLOB = "@reproduce_failure("  # Hypothesis says so of every failure, beside the arguments


def seed(fixed: int) -> int:
    """The same number every time, and in a search one that belongs to the round."""
    of_round = os.environ.get(SEED_VARIABLE)
    return fixed if of_round is None else random.Random(f"{of_round}/{fixed}").getrandbits(32)


def examples_in(output: str) -> int:
    """How many examples Hypothesis took, by its statistics."""
    counts = re.findall(r"(\d+) passing.*, (\d+) failing.*, (?:and )?(\d+) invalid", output)
    return sum(int(number) for each in counts for number in each)


def failed_tests(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)


def how_to_keep(output: str, number: int, tests: str) -> str:
    """What to do with what was found."""
    first, *others = failed_tests(output) or [tests]
    lines = [f"Again: {SEED_VARIABLE}={number} {again(first, number)}"]
    if BLOB in output:
        lines.append(
            "To keep it: write the arguments shown above the test as @example(…), and mend what fails. "
            "Hypothesis tries them first in the next search too (.hypothesis)."
        )
    if output.count(BLOB) <= len(others):
        lines.append("What a fuzzer found: make the bytes that fail an example of their own in the test.")
    return "\n".join(lines)


def again(test: str, number: int) -> str:
    return f"HYPOTHESIS_PROFILE=search {Path(sys.executable)} -m pytest --hypothesis-seed {number} '{test}'"


def search(minutes: float, tests: str, first: int | None) -> int:
    end_s = time.monotonic() + 60 * minutes
    rounds = examples = 0
    while rounds == 0 or time.monotonic() < end_s:
        number = random.SystemRandom().getrandbits(32) if first is None else first + rounds
        command = [sys.executable, "-m", "pytest", "--quiet", "-m", "search", "-p", "no:cacheprovider", tests]
        command += ["--hypothesis-seed", str(number), "--hypothesis-show-statistics"]
        environment = {**os.environ, "HYPOTHESIS_PROFILE": "search", SEED_VARIABLE: str(number)}
        # What takes longer than the minutes is not cut off: pytest ends what hangs, a finding too.
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        rounds += 1
        examples += examples_in(done.stdout)
        if done.returncode == FAILED:
            print(re.split(r"^=+ Hypothesis Statistics", done.stdout, flags=re.MULTILINE)[0])
            print(f"\nround {rounds} (seed {number}): {', '.join(failed_tests(done.stdout))}")
            print(how_to_keep(done.stdout, number, tests))
            return FAILED
        if done.returncode:
            print(done.stdout[-4000:])
            return 2
        print(f"round {rounds} (seed {number}): {examples} examples so far, none fails", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="New examples for the properties and the fuzzers.")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="a round that has begun ends (%(default)s)"
    )
    parser.add_argument("--seed", type=int, help="of the first round (random)")
    parser.add_argument("tests", nargs="?", default=str(Path(__file__).parent), help="where to look (all)")
    words = parser.parse_args()
    return search(words.minutes, words.tests, words.seed)


if __name__ == "__main__":
    sys.exit(main())
