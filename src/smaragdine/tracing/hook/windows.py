"""The windows of a process: which steps the profiler runs over, and what that costs."""

import json
import os
import time

from . import marks, tracers

FOLDER = "SMARAGDINE_TRACE_FOLDER"
STEPS = "SMARAGDINE_TRACE_STEPS"
SKIP = "SMARAGDINE_TRACE_SKIP"
BUDGET = "SMARAGDINE_TRACE_BUDGET"

FORWARD = "torch:forward"  # a model's calls, where nothing else announces steps
_FIRST_WINDOW_S = 2.0
_MOST_BYTES = 64 << 20  # of a window's raw file; its events are in memory until then
_OVERDUE_S = 10.0
_GUESSED_COST_S = 0.5  # to start and stop a profiler that has not run yet


class Settings:
    def __init__(self, folder, steps=20, skip=10, budget=None, quiet_s=15.0):
        self.folder = folder
        self.steps = steps  # 0: all
        self.skip = skip
        self.budget = budget  # the part of the time so far that tracing may cost; None: any
        self.quiet_s = quiet_s  # without a step for this long, a program is taken to have none


def settings_of(environ):
    """None where nothing is to be traced."""
    if not environ.get(FOLDER):
        return None
    budget = environ.get(BUDGET)
    return Settings(
        environ[FOLDER],
        int(environ.get(STEPS, "20")),
        int(environ.get(SKIP, "10")),
        float(budget) if budget else None,
    )


class Plan:
    """What a process traces. Its methods are called one at a time."""

    def __init__(self, settings):
        self.pid = os.getpid()
        self.settings = settings
        self.source = None  # the first to announce a step; a second optimizer's steps are inside its own
        self.done = False
        self.seen = 0
        self.traced = 0
        self.windows = 0
        self.window = None
        self.bytes_per_s = None  # of the raw files so far
        self.cost = _Cost()

    def step_ended(self, source, index, t_ns):
        if self.source is None or self.source == FORWARD:
            # A slice, or calls of a model that turns out to be trained.
            if self.source != source:
                self.close()
            self.source = source
        if self.done or source != self.source:
            return
        self.seen += 1
        window = self.window
        if window is None:
            self.cost.untraced(t_ns)
            if self.seen >= max(1, self.settings.skip) and self._affordable():
                self.open(tracers.of_source(source))
        elif window.complete:
            self.close()
        else:
            self.cost.traced(window.add(index, t_ns))
            self.traced += 1
            window.complete = self._enough(window)
            # PyTorch's mark comes inside the optimizer's step, whose own record would be lost if the
            # profiler stopped there: it runs into the next one.
            if window.complete and not source.startswith("torch"):
                self.close()

    def step_begins(self, t_ns):
        """What lies before is no part of it: an evaluation, or the end of an epoch."""
        self.cost.last_ns = None
        if self.window is not None:
            self.window.last_ns = max(self.window.last_ns, t_ns)

    def open(self, tracer):
        asked_ns = time.time_ns()
        session = tracer.start()
        self.window = _Window(tracer, session, asked_ns)
        self.cost.pause(self.window.begin_ns - asked_ns)

    def close(self):
        """The window that is open, if any."""
        window, self.window = self.window, None
        if window is None:
            return
        self.done = bool(self.settings.steps) and self.traced >= self.settings.steps
        end_ns = time.time_ns()
        name = "%s-%d-%d" % (window.tracer.FRAMEWORK, self.pid, self.windows)
        self.windows += 1
        base = os.path.join(self.settings.folder, name)
        path = base + window.tracer.SUFFIX
        try:
            os.makedirs(self.settings.folder, exist_ok=True)
        finally:
            # Also where nothing can be written: the profiler must not go on.
            facts = window.tracer.stop(window.session, path)
        stopped_ns = time.time_ns()
        self.cost.pause(stopped_ns - end_ns)
        self.bytes_per_s = os.path.getsize(path) / max((end_ns - window.begin_ns) * 1e-9, 1e-3)
        meta = {
            "framework": window.tracer.FRAMEWORK,
            "format": window.tracer.FORMAT,
            "suffix": window.tracer.SUFFIX,
            "rank": marks.rank_of(os.environ),
            "pid": self.pid,
            "begin_ns": window.begin_ns,
            "end_ns": end_ns,
            "asked_ns": window.asked_ns,
            "stopped_ns": stopped_ns,
            "source": self.source,
            "steps": window.steps,
        }
        meta.update(facts or {})
        with open(base + ".meta.json", "w") as file:
            json.dump(meta, file)

    def overdue(self):
        """No step ends the window: the loop is over, or waits for something."""
        window = self.window
        if window is None or self.source is None:
            return False
        waited_s = (time.time_ns() - window.last_ns) * 1e-9
        return waited_s > max(_OVERDUE_S, 20 * self.cost.longest_s)

    def give_up(self, exception):
        self.window, self.done = None, True

    def _enough(self, window):
        if self.settings.steps and self.traced >= self.settings.steps:
            return True
        most_s = _FIRST_WINDOW_S if self.bytes_per_s is None else _MOST_BYTES / max(self.bytes_per_s, 1.0)
        if (window.last_ns - window.begin_ns) * 1e-9 >= most_s:
            return True
        return not self._affordable()

    def _affordable(self):
        budget = self.settings.budget
        return budget is None or self.cost.forecast_s(self.window is None) <= budget * self.cost.elapsed_s()


class _Window:
    def __init__(self, tracer, session, asked_ns):
        self.tracer, self.session = tracer, session
        self.asked_ns = asked_ns
        self.begin_ns = self.last_ns = time.time_ns()
        self.steps = []  # (index, begin, end)
        self.complete = False

    def add(self, index, t_ns):
        """A step; its length."""
        begin_ns, self.last_ns = self.last_ns, t_ns
        self.steps.append((index, begin_ns, t_ns))
        return (t_ns - begin_ns) * 1e-9


class _Cost:
    """How much longer the program takes because it is traced."""

    _KEPT = 51

    def __init__(self):
        self.first_ns = None
        self.last_ns = None
        self.lengths_s = []  # of untraced steps, the latest ones
        self.longest_s = 0.0
        self.spent_s = 0.0
        self.slower_s = None  # a traced step, than an untraced one
        self.pauses_s = []  # to start and to stop, in turn

    def untraced(self, t_ns):
        if self.first_ns is None:
            self.first_ns = t_ns
        elif self.last_ns is not None:
            self._saw((t_ns - self.last_ns) * 1e-9)
            self.lengths_s.append((t_ns - self.last_ns) * 1e-9)
            del self.lengths_s[: -self._KEPT]
        self.last_ns = t_ns

    def traced(self, length_s):
        self._saw(length_s)
        self.slower_s = max(0.0, length_s - self.typical_s())
        self.spent_s += self.slower_s

    def pause(self, length_ns):
        self.pauses_s.append(length_ns * 1e-9)
        self.spent_s += length_ns * 1e-9
        self.last_ns = None  # the step it happened in says nothing

    def typical_s(self):
        return sorted(self.lengths_s)[len(self.lengths_s) // 2] if self.lengths_s else 0.0

    def elapsed_s(self):
        return (time.time_ns() - self.first_ns) * 1e-9

    def forecast_s(self, opening):
        """What will have been spent after one more step and the window's end."""
        slower_s = self.typical_s() if self.slower_s is None else self.slower_s
        pauses_s = self.pauses_s[-2:] if opening else self.pauses_s[1:][-1:]
        return self.spent_s + slower_s + (sum(pauses_s) if pauses_s else _GUESSED_COST_S)

    def _saw(self, length_s):
        self.longest_s = max(self.longest_s, length_s)
