"""Option parsing as all verbs do it: errors in our own one-line form, an example in every --help."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from smaragdine.errors import UserError, visible

if TYPE_CHECKING:
    from smaragdine.accounting.run import Run


class Parser(argparse.ArgumentParser):
    def __init__(self, verb: str, description: str, example: str) -> None:
        super().__init__(
            prog=f"smaragdine {verb}",
            description=description,
            epilog=f"example:\n{example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._verb = verb

    def error(self, message: str) -> NoReturn:
        raise UserError(message, remedy=f"See smaragdine {self._verb} --help")


def positive_seconds(text: str) -> float:
    return _number(text, 0 < (value := _float(text)) < 1e7, value, "a number of seconds above 0")


def positive_watts(text: str) -> float:
    return _number(text, 0 < (value := _float(text)) < 1e6, value, "a power above 0 W")


def grams_per_kwh(text: str) -> float:
    return _number(
        text, 0 <= (value := _float(text)) < 1e4, value, "grams of CO₂ per kWh, from 0 to below 10000"
    )


def period_ms(text: str) -> float:
    return _number(text, 1 <= (value := _float(text)) <= 1000, value, "a period between 1 and 1000 ms")


def percentage(text: str) -> float:
    """A part of one."""
    value = _float(text.removesuffix("%"))
    good = text.endswith("%") and 0 < value <= 1000
    return _number(text, good, value / 100, "a percentage above 0, such as 1%")


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def _number(text: str, good: bool, value: float, what: str) -> float:
    if not good:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def count(text: str) -> int:
    return _whole(text, 0)


def positive_count(text: str) -> int:
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    if text.isascii() and text.isdigit() and len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is above 999999999, the most there can be")
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
    return int(text)


def counts(text: str) -> list[int]:
    return [positive_count(word) for word in text.split(",")]


def parameter(text: str) -> tuple[str, list[str | int | float]]:
    name, equals, values = text.partition("=")
    if not equals or not name or "" in values.split(","):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE,… such as batch=16,32")
    return name, [_value(word) for word in values.split(",")]


def _value(word: str) -> str | int | float:
    """A number only where it would be written the same way again: 007 and 1e3 stay as they are."""
    for kind in (int, float):
        try:
            if str(kind(word)) == word:
                return kind(word)
        except ValueError:
            continue
    return word


def split_words(words: list[str], with_value: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits our options from the program and its arguments. `with_value` names the options that take one."""
    i = 0
    while i < len(words) and words[i].startswith("-") and words[i] not in ("-m", "--", "-"):
        i += 2 if words[i] in with_value else 1
    return words[:i], words[i:]


def opened(path: str | os.PathLike[str], baseline: Run | None = None) -> Run:
    """A recording for a verb that shows no remarks of its own: what is wrong with it goes to stderr."""
    from smaragdine.accounting.run import Run

    run = replace(Run.open(path), baseline=baseline)
    say_damage(run)
    return run


def opened_baseline(path: str | os.PathLike[str], say: bool = True) -> Run:
    """What is wrong with it goes to stderr too, unless the figures that rest on it `say` so themselves."""
    from smaragdine.accounting.run import Run

    run = Run.open(path)
    run.refuse_work()
    for line in run.idle_machine.remarks if say else ():
        print(f"smaragdine: {run.path}: {visible(line)}", file=sys.stderr)
    return run


def say_damage(run: Run) -> None:
    for line in run.recording.damage:
        print(f"smaragdine: {run.path}: {visible(line)}", file=sys.stderr)


def add_merge_options(parser: argparse._ActionsContainer) -> None:  # pyright: ignore[reportPrivateUsage]
    parser.add_argument("--summary", action="store_true", help="merge self-similar layers: layer_*")
    parser.add_argument(
        "--merge",
        metavar="RULE",
        action="append",
        default=[],
        help=r"merge layers by a rule of your own: 'layer_(\d+)=transformer'; may be given again",
    )
