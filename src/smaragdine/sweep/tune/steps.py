"""The program's steps as they come into the spool of its recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smaragdine.recording.marks import NewMarks

_QUIET_NS = 2_000_000_000  # before another stream of steps is followed
_QUIET_STEPS = 10
# Between steps: what an evaluation or the end of an epoch takes is nobody's step.
_BETWEEN = ("train_", "epoch_", "evaluate_", "predict_")


@dataclass(frozen=True)
class Step:
    """From the end of the step before to its own. One mark may stand for several steps."""

    begin_ns: int
    end_ns: int
    count: int = 1


@dataclass
class _Stream:
    """Steps of one announcer: an optimizer or a trainer in one process."""

    end_ns: int
    index: int | None
    length_ns: int = 0  # of the last step

    def take(self, end_ns: int, index: int | None) -> Step:
        ahead = 1 if index is None or self.index is None else index - self.index
        step = Step(self.end_ns, end_ns, max(1, ahead))
        self.end_ns, self.index, self.length_ns = end_ns, index, end_ns - step.begin_ns
        return step


class Follower:
    """Follows one stream. Processes that train together announce the same steps; one of them is enough."""

    def __init__(self, spool: Path) -> None:
        self._marks = NewMarks(spool)
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._between_ns: dict[int, int] = {}  # process → its last mark between steps
        self._followed: tuple[int, str] | None = None
        self.ended = 0  # steps of the followed streams so far

    def look(self) -> list[Step]:
        """New steps with nothing between them and the one before."""
        steps: list[Step] = []
        for mark in self._marks.look():
            if mark["source"] not in ("run", "monitor", "tune"):
                steps += self._take(mark)
        return steps

    def _take(self, mark: Mapping[str, Any]) -> list[Step]:
        name, t_ns, pid = mark["name"], mark["t_ns"], mark["pid"] or 0
        if name.startswith(_BETWEEN):
            self._between_ns[pid] = max(self._between_ns.get(pid, 0), t_ns)
        if name != "step_end":
            return []
        key = pid, mark["source"] or ""
        stream = self._streams.get(key)
        if stream is None or t_ns <= stream.end_ns:
            self._streams[key] = _Stream(t_ns, mark["index"])
            self._count(key, t_ns, 1)
            return []
        step = stream.take(t_ns, mark["index"])
        if not self._count(key, t_ns, step.count) or self._between_ns.get(pid, 0) >= step.begin_ns:
            return []
        return [step]

    def _count(self, key: tuple[int, str], t_ns: int, count: int) -> bool:
        """Whether this stream is the one to follow."""
        now = self._streams.get(self._followed) if self._followed is not None else None
        if now is None or t_ns - now.end_ns > max(_QUIET_NS, _QUIET_STEPS * now.length_ns):
            self._followed = key
        if self._followed != key:
            return False
        self.ended += count
        return True
