"""What is known of a card: every replay that was ever made on it, a line of JSON each.

    $XDG_CACHE_HOME/smaragdine/calibration/GPU-2d549b0d-….jsonl

A line is written when a replay is done, so that whoever is interrupted loses one at most. A later line of the
same call, driver and library replaces an earlier one. `docs/calibration.md` has the columns.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from smaragdine.errors import UserError, visible
from smaragdine.sensors.energy import MOST_W

_CARD = re.compile(r"GPU-[0-9a-fA-F-]{8,64}")


@dataclass(frozen=True)
class CacheState:
    """A call replayed with its inputs in one state of the caches."""

    power_w: float  # while its kernels run
    time_s: float  # of one call
    spread: float  # of power above idle, between the parts of the replay
    clock_mhz: float
    slowed: float  # of the time, the part in which the card's limits held the clock down
    temperature_c: float
    rest: float  # after each turn, a rest of so many times its length


@dataclass(frozen=True)
class MeasuredCall:
    """One call, replayed alone."""

    key: str  # of the call: operation, inputs, settings and kernels
    op: str
    card: str  # UUID
    name: str  # of the card
    driver: str
    library: str  # torch 2.11.0+cu130
    idle_w: float  # of the card between the calls, at their clock
    cold: CacheState | None = None
    hot: CacheState | None = None
    limited: CacheState | None = None  # cold and back to back, at the lower clock that the limits left it
    why: str = ""  # there is no state
    kernel: str = ""  # of its kernels, the one of most blocks
    blocks: int = 0
    program: str = ""  # that called it first


def call_key(op: str, inputs: str, settings: str, kernels: str) -> str:
    text = "\0".join([op, inputs, settings, kernels])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    named = environment.get("SMARAGDINE_CALIBRATION")
    if named:
        return Path(named)
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".cache"
    return Path(cache) / "smaragdine" / "calibration"


class Store:
    """The replays of all cards, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def cards(self) -> dict[str, list[MeasuredCall]]:
        """Card → what is known of it."""
        found = {card: self.of(card) for card in self._names()}
        return {card: replays for card, replays in found.items() if replays}

    def named(self, word: str) -> str:
        """The card whose UUID begins so; the word itself where it is none's, or several cards'."""
        begin = word.rstrip("…")
        found = [card for card in self._names() if begin.startswith("GPU-") and card.startswith(begin)]
        return found[0] if len(found) == 1 else word

    def of(self, card: str) -> list[MeasuredCall]:
        """The latest replay of every call, driver and library. A line that cannot be read counts for nothing:
        the last one may be half."""
        latest: dict[tuple[str, str, str], MeasuredCall] = {}
        for line in self._lines(card):
            replay = _read(line)
            if replay is not None:
                latest[replay.key, replay.driver, replay.library] = replay
        return list(latest.values())

    def damage(self) -> list[str]:
        """Files of which lines cannot be read: what they said is replayed anew."""
        said: list[str] = []
        for card in self._names():
            lines = [line for line in self._lines(card) if line.strip()]
            odd = sum(_read(line) is None for line in lines)
            if odd:
                said.append(
                    f"{self._path(card)}: {odd} of {len(lines)} lines cannot be read, and count for nothing"
                )
        return said

    def add(self, replay: MeasuredCall) -> None:
        path = self._path(replay.card)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                # After half a line, of somebody who was killed, a new one begins.
                begin = b"" if not file.tell() or _ends_whole(path) else b"\n"
                file.write(begin + msgspec.json.encode(dataclasses.asdict(replay)) + b"\n")
        except OSError as error:
            raise UserError(
                f"{path} cannot be written", error.strerror or str(error), "Name another folder: --store DIR"
            ) from None

    def forget(self, card: str) -> bool:
        """Whether anything was known."""
        try:
            self._path(card).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UserError(f"{self._path(card)} cannot be removed", error.strerror or str(error)) from None
        return True

    def _names(self) -> list[str]:
        try:
            names = sorted(path.stem for path in self.folder.iterdir() if path.suffix == ".jsonl")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be read",
                error.strerror or str(error),
                "Name another folder: --store DIR",
            ) from None
        return [name for name in names if _CARD.fullmatch(name)]

    def _lines(self, card: str) -> Iterator[bytes]:
        try:
            with self._path(card).open("rb") as file:
                yield from file
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"{self._path(card)} cannot be read", error.strerror or str(error)) from None

    def _path(self, card: str) -> Path:
        if not _CARD.fullmatch(card):
            raise UserError(
                f"{visible(card) or 'nothing'} is no UUID of a GPU",
                remedy="smaragdine calibrate --list names those known",
            )
        return self.folder / f"{card}.jsonl"


def _read(line: bytes) -> MeasuredCall | None:
    try:
        found = msgspec.json.decode(line, type=MeasuredCall)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    states = [state for state in (found.cold, found.hot, found.limited) if state is not None]
    possible = all(0 <= each.power_w < MOST_W and 0 < each.time_s < 1e6 for each in states)
    return found if possible and 0 <= found.idle_w < MOST_W else None


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
