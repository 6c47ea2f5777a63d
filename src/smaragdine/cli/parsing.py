"""Option parsing as all verbs do it: errors in our own one-line form, an example in every --help."""

from __future__ import annotations

import argparse
from typing import NoReturn

from smaragdine.errors import UserError


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
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def period_ms(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a period between 1 and 1000 ms")
    return value


def positive_watts(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a power above 0 W")
    return value


def count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def counts(text: str) -> list[int]:
    numbers = [count(word) for word in text.split(",")]
    if 0 in numbers:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers from 1")
    return numbers
