"""The loop: follows the program, sets the limit that the policy asks for, and marks every change."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smaragdine.clock import SYSTEM, Clock
from smaragdine.errors import UserError
from smaragdine.sensors.base import SensorLost
from smaragdine.sensors.nvml_limits import Setting as Limit
from smaragdine.sweep.limits import Lender
from smaragdine.sweep.tune.collect import Collector, SliceOptions
from smaragdine.sweep.tune.energy import Energy
from smaragdine.sweep.tune.policy import Policy
from smaragdine.sweep.tune.steps import Follower

MARKS_FILE = "marks-tune.jsonl"
_POLL_S = 0.005
_LOOK_NS = 50_000_000  # between two looks into the spool
_REST_S = 0.1
_RESTS = 2.0  # once settled, nothing is read for so many times the length of a slice
_MOST_VOID = 3

# Waits so many seconds; True when it is time to end.
Wait = Callable[[float], bool]


@dataclass
class Tuner:
    """Until `wait` says so, or limits or energy are lost; limits are the lender's to bring back."""

    lender: Lender
    energy: Energy
    policy: Policy
    devices: Sequence[str]
    spool: Path
    options: SliceOptions
    clock: Clock = SYSTEM
    problem: str = ""  # why it ended early
    _void: int = 0
    _set_w: float | None = None
    _begin_ns: int = 0  # of the slice, with the rest before it
    _measured_ns: int = 0  # and without
    _begin_steps: int = 0
    _looked_ns: int = 0
    _follower: Follower = field(init=False)
    _collector: Collector = field(init=False)

    def __post_init__(self) -> None:
        self._follower = Follower(self.spool)
        self._collector = Collector(self.energy, self.options)

    def run(self, wait: Wait) -> None:
        try:
            while self._follower.ended <= self.options.skip:
                if wait(_REST_S):
                    return
                self._follower.look()
            self._mark(
                "tune_begin", {"limits_w": self.policy.limits_w, "objective": self.policy.objective.kind}
            )
            self._apply("trying")
            while not self._slice(wait):
                pass
        except (UserError, SensorLost) as error:
            self.problem = str(error)
        if self._set_w == self.policy.limit_w:
            self._follower.look()
            steps, now_ns = self._follower.ended - self._begin_steps, self.clock.wall_ns()
            self.policy.finish(steps, (now_ns - self._begin_ns) * 1e-9)
        if self.problem:
            self._mark("tune_end", {"problem": self.problem})

    def _slice(self, wait: Wait) -> bool:
        """One slice from its beginning to what follows from it; True when it is time to end."""
        found = None
        while found is None:
            if wait(_POLL_S):
                return True
            self.energy.read()
            if self.clock.mono_ns() - self._looked_ns >= _LOOK_NS:
                self._looked_ns = self.clock.mono_ns()
                self._collector.take(self._follower.look())
                now_ns = self.clock.wall_ns()
                steps = self._follower.ended - self._begin_steps
                span_s = (now_ns - self._begin_ns) * 1e-9
                found = self._collector.made(self.policy.limit_w, steps, span_s)
        if not self.lender.held():
            self._again()
            return False
        self._void = 0
        was_settled, searches = self.policy.settled, len(self.policy.searches)
        self.policy.take(found)
        took_ns = self.clock.wall_ns() - self._measured_ns
        if len(self.policy.searches) > searches:
            self._mark("workload_changed", {"why": self.policy.search.why})
        if self.policy.settled and not was_settled:
            self._mark("tune_settled", {"limit_w": self.policy.limit_w})
        self._apply("settled" if self.policy.settled else "trying")
        return self.policy.settled and was_settled and self._rest(wait, took_ns)

    def _rest(self, wait: Wait, took_ns: int) -> bool:
        """A settled program is looked at now and then."""
        until_ns = self.clock.wall_ns() + round(_RESTS * took_ns)
        while self.clock.wall_ns() < until_ns:
            if wait(_REST_S):
                return True
        self._measured_ns = self.clock.wall_ns()
        self._collector.begin(self._measured_ns, settle=False)
        return False

    def _apply(self, why: str) -> None:
        """The next slice begins, at the limit that the policy wants."""
        limit_w = self.policy.limit_w
        changed = limit_w != self._set_w
        if changed:
            self.lender.apply({(device, "power"): Limit(limit_w) for device in self.devices})
            self._set_w = limit_w
            self._mark("limit_set", {"limit_w": limit_w, "devices": list(self.devices), "why": why})
        self._begin_ns = self._measured_ns = self.clock.wall_ns()
        self._begin_steps = self._follower.ended
        self._collector.begin(self._begin_ns, settle=changed)

    def _again(self) -> None:
        """Somebody else took the limit back: what was measured is of no known limit."""
        self._void += 1
        if self._void == _MOST_VOID:
            raise UserError("limits do not stand", "something else takes them back", "See smaragdine daemon")
        self._set_w = None
        self._apply("taken back by something else")

    def _mark(self, name: str, detail: dict[str, Any]) -> None:
        """Into the recording; a full disk loses the mark, not the run."""
        mark = {"t_ns": self.clock.wall_ns(), "name": name, "source": "tune", "detail": detail}
        with (
            contextlib.suppress(OSError),
            open(self.spool / MARKS_FILE, "a", encoding="utf-8") as file,
        ):
            file.write(json.dumps(mark) + "\n")
