"""The GPU's energy counter, read at the instants it changes.

The counter steps (every 100 ms on an H200) and a call is dear (3 ms there, up to 30 while the GPU is busy).
A value read at an arbitrary time is up to a whole step old, so a reading is an observed change. It is stamped
halfway between the starts of the last poll that saw the old value and of the first that saw the new one: the
driver takes the value when the call begins, however long it then lasts (of 120 steps on an H200 under load,
the starts bracket a regular step every time, to 0.5 ms; the ends miss it by up to 6 ms). The next step is
predicted from the last one, and polling begins shortly before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from smaragdine.clock import Clock
from smaragdine.sensors.base import Channel
from smaragdine.sensors.nvml_gpu import Gpu, Health, hold_library, nvml, release_library, usual_step

MS_NS = 1_000_000
DEFAULT_PERIOD_NS = 100 * MS_NS
PROBE_NS = 500 * MS_NS
PROBE_CHANGES = 4
POLL_S = 0.001
LEAD_NS = 6 * MS_NS  # a call of 3 ms must begin before the step, even if it begins late
GAP_NS = 12 * MS_NS  # a change bracketed less tightly makes a poor anchor
READ_BUDGET_NS = 250 * MS_NS
CLOSE_BUDGET_NS = 500 * MS_NS
ANCHOR_NS = 2_000_000_000  # accounting takes no anchors closer than that
ANCHOR_AT_LEAST_NS = 1_700 * MS_NS
QUIET_NS = 8_000_000_000


@dataclass(frozen=True)
class Change:
    """A step of the counter: its middle on both clocks, how tightly it is bracketed, the new value."""

    t_ns: int
    mono_ns: int
    gap_ns: int
    value_mj: int


@dataclass(frozen=True)
class Pace:
    """How often the counter steps, and the last step seen (None: none was, the period is a default)."""

    period_ns: int
    last: Change | None

    @property
    def found(self) -> str:
        period_ms = self.period_ns / MS_NS
        return f"steps every {period_ms:.0f} ms" + (
            "" if self.last else " (assumed: no step was seen at start)"
        )


class Watch:
    """Polls the counter and notices changes."""

    def __init__(self, read_mj: Callable[[], int], clock: Clock) -> None:
        self._read_mj = read_mj
        self._clock = clock
        self._value_mj: int | None = None
        self._start_ns = 0

    def restart(self) -> None:
        """Forget the last poll: what has changed since then changed at no known time."""
        self._value_mj = None

    def poll(self, period_ns: int | None = None) -> Change | None:
        """One call; the change it saw. With several steps unseen, the last of them is the one stamped."""
        wall_ns, start_ns = self._clock.wall_ns(), self._clock.mono_ns()
        value_mj = self._read_mj()
        before_mj, gap_ns = self._value_mj, start_ns - self._start_ns
        self._value_mj, self._start_ns = value_mj, start_ns
        if before_mj is None or before_mj == value_mj:
            return None
        if period_ns is not None:
            gap_ns = min(gap_ns, period_ns)
        return Change(wall_ns - gap_ns // 2, start_ns - gap_ns // 2, gap_ns, value_mj)


def find_pace(read_mj: Callable[[], int], clock: Clock) -> Pace:
    """Polls for up to 0.5 s. Raises NVMLError where there is no counter."""
    watch = Watch(read_mj, clock)
    changes: list[Change] = []
    deadline_ns = clock.mono_ns() + PROBE_NS
    while clock.mono_ns() < deadline_ns and len(changes) < PROBE_CHANGES:
        change = watch.poll()
        if change is not None:
            changes.append(change)
        clock.sleep_s(POLL_S)
    if len(changes) < 2:
        return Pace(DEFAULT_PERIOD_NS, None)
    return Pace(max(MS_NS, round(usual_step([change.mono_ns for change in changes]))), changes[-1])


class CounterSensor:
    """Energy of one GPU since the driver was loaded, in joules.

    Beside a sample ring one change in two seconds is enough and `read` waits for it; `alone`, every step is
    wanted: `read` is called often, waits for the first one, which a run stands on, and then polls only when
    a step is due.
    """

    lane = "nvml"

    def __init__(
        self, gpu: Gpu, clock: Clock, read_mj: Callable[[], int], pace: Pace, *, alone: bool, detail: str
    ) -> None:
        hold_library()
        self._clock = clock
        self._alone = alone
        self._health = Health(gpu.device, clock)
        self._watch = Watch(read_mj, clock)
        self._period_ns = float(pace.period_ns)
        self._last_ns = float(pace.last.mono_ns) if pace.last else None
        self._lead_ns = min(float(LEAD_NS), pace.period_ns / 2)
        self._gap_ns = GAP_NS
        self._misses = 0
        self._not_before_ns = 0
        self._begun = False
        if alone:
            self.period_ns = min(max(pace.period_ns // 20, 2 * MS_NS), 10 * MS_NS)
        elif pace.period_ns <= READ_BUDGET_NS - 2 * LEAD_NS:
            self.period_ns = ANCHOR_NS
        else:
            self.period_ns = READ_BUDGET_NS
        stamp_ms = self.period_ns / MS_NS / 2 + 2 if alone else GAP_NS / MS_NS / 2
        self._channel = Channel(
            gpu.device,
            "energy",
            "J",
            "counter",
            "measured",
            pace.period_ns / MS_NS if alone else max(ANCHOR_NS, pace.period_ns) / MS_NS,
            "nvml",
            detail=f"{detail}; counter {pace.found}; each reading an observed step, ±{stamp_ms:.0f} ms",
        )

    def channels(self) -> Sequence[Channel]:
        return (self._channel,)

    def read(self) -> Sequence[tuple[int, int, float]]:
        now_ns = self._clock.mono_ns()
        if now_ns < self._not_before_ns:
            return ()
        look = self._glance if self._alone else self._wait
        change = self._health.attempt(lambda: look(now_ns))
        return () if change is None else (_reading(change),)

    def close(self) -> Sequence[tuple[int, int, float]]:
        lib = nvml()
        try:
            change = self._look(min(CLOSE_BUDGET_NS, int(2 * self._period_ns) + LEAD_NS))
            return () if change is None else (_reading(change),)
        except lib.NVMLError:
            return ()
        finally:
            release_library()

    def _glance(self, now_ns: int) -> Change | None:
        if self._begun:
            change = self._watch.poll(int(self._period_ns))
            change = None if change is None else self._learn(change)
        else:
            change, self._begun = self._look(READ_BUDGET_NS), True
        if change is not None:
            self._not_before_ns = int(change.mono_ns + self._period_ns - self._lead_ns)
        elif self._last_ns is not None and now_ns > self._last_ns + 4 * self._period_ns:
            self._not_before_ns = int(now_ns + self._period_ns / 2)
        return change

    def _wait(self, now_ns: int) -> Change | None:
        if self._wait_ns(now_ns) > READ_BUDGET_NS - 2 * LEAD_NS:
            return None
        change = self._look(READ_BUDGET_NS)
        if change is None:
            self._misses += 1
            self._not_before_ns = now_ns + min(ANCHOR_NS << min(self._misses, 8), QUIET_NS)
        else:
            self._misses = 0
            self._not_before_ns = change.mono_ns + ANCHOR_AT_LEAST_NS
        return change

    def _wait_ns(self, now_ns: int) -> int:
        """How long until polling should begin, so that the next step falls into it."""
        if self._last_ns is None or self._lead_ns >= self._period_ns / 2:
            return 0
        steps = -(-(now_ns + self._lead_ns - self._last_ns) // self._period_ns)
        return int(self._last_ns + steps * self._period_ns - self._lead_ns - now_ns)

    def _look(self, budget_ns: int) -> Change | None:
        start_ns = self._clock.mono_ns()
        wait_ns = self._wait_ns(start_ns)
        deadline_ns = start_ns + min(budget_ns, wait_ns + int(3 * self._period_ns) + LEAD_NS)
        if wait_ns > 0:
            self._clock.sleep_s(wait_ns / 1e9)
        self._watch.restart()
        while True:
            change = self._watch.poll()
            if change is not None:
                change = self._learn(change)
                # A machine too busy for tight polling would never give an anchor: each refusal doubles
                # what is taken next.
                if change.gap_ns <= self._gap_ns:
                    self._gap_ns = GAP_NS
                    return change
                self._gap_ns *= 2
            if self._clock.mono_ns() >= deadline_ns:
                self._lead_ns = min(2 * self._lead_ns, self._period_ns / 2)
                return None
            self._clock.sleep_s(POLL_S)

    def _learn(self, change: Change) -> Change:
        """Follows the counter's phase and period, and stamps a loosely bracketed step by prediction.

        The step is known to lie in the bracket and nothing more: a prediction inside it is kept, one
        outside is moved to the nearer edge. So a slow call does not throw the phase off.
        """
        step_ns, half_ns = float(change.mono_ns), change.gap_ns / 2
        miss_ns = 0.0
        if self._last_ns is not None:
            steps = max(1, round((change.mono_ns - self._last_ns) / self._period_ns))
            predicted_ns = self._last_ns + steps * self._period_ns
            step_ns = min(max(predicted_ns, change.mono_ns - half_ns), change.mono_ns + half_ns)
            miss_ns = step_ns - predicted_ns
            if abs(miss_ns) < self._period_ns / 4:
                self._period_ns += miss_ns / steps / 2
        self._lead_ns = min(LEAD_NS + 2 * abs(miss_ns), self._period_ns / 2)
        self._last_ns = step_ns
        if change.gap_ns <= GAP_NS:
            return change
        moved_ns = round(step_ns - change.mono_ns)
        return replace(change, t_ns=change.t_ns + moved_ns, mono_ns=change.mono_ns + moved_ns)


def _reading(change: Change) -> tuple[int, int, float]:
    return change.t_ns, 0, change.value_mj / 1000
