"""The windows of a process: which steps the profiler runs over, what a window sees, and what it costs."""

import json
import os
import shutil
import tempfile
import time

from . import marks, tracers
from .training import FORWARD

_FIRST_WINDOW_S = 4.0
_MOST_BYTES = 64 << 20  # of a window's raw file: its events are in memory until it is written
_OVERDUE_S = 10.0
_SHORT_S = 0.25  # a window: writing its file takes about twice as long at most
_WORTHWHILE = 3  # steps: starting and stopping a profiler for fewer wastes the budget
_SILENT = 20  # steps of others in a row: after that many, whoever was followed has ended
# Steps until the next attempt where the program runs a profiler of its own; twice as many each time.
_FIRST_WAIT, _LONGEST_WAIT = 4, 64
_MOST_BROKEN = 5  # windows: each one that the program's profiler ends has cost something
_KEPT = 51  # lengths of untraced steps; their median counts
# What is put aside for a profiler that has not run yet. Its start and stop took 2 to 50 ms on processors; on
# an H200 48 ms, and the steps after it took 50 to 370 ms longer altogether.
_GUESSED_PAUSE_S, _GUESSED_PAUSE_GPU_S = 0.1, 0.5


class WindowPlan:
    """What a process traces. One thread at a time calls its methods."""

    def __init__(self, settings, clock_ns=time.time_ns):
        self.pid = os.getpid()
        self.settings = settings
        self.source = None  # the first to announce a step; a second optimizer's steps are inside its own
        self.done = False
        self.failed = False
        self.seen = 0
        self.traced = 0
        self.windows = 0
        self.window = None
        self.ending = None  # of the last window, where its file is written beside the program
        self.ending_s = 0.0  # how long that window was
        self.bytes_per_s = None  # of the raw files so far
        self.cost = WindowCost()
        self.refusal = None  # what the program's own profiler was in the way of
        self._wait = _FIRST_WAIT
        self._next = 0  # steps to have been seen before the next attempt
        self._broken = 0  # windows that the program's profiler has ended
        self._others = 0  # steps of other sources since its own last one
        self._clock_ns = clock_ns
        self._begin_ns = clock_ns()

    def step_ended(self, source, index, t_ns):
        if source != self.source and not self._follow(source):
            return
        self._others = 0
        if self.done:
            return
        self.seen += 1
        window = self.window
        if window is None:
            self.cost.untraced(t_ns)
            if self.seen >= max(1, self.settings.skip, self._next) and self._affordable():
                self.open(tracers.of_source(source))
        elif window.complete:
            self.cost.traced((t_ns - window.last_ns) * 1e-9)
            window.last_ns = t_ns  # should it not be closed yet
            self.close()
        else:
            self.cost.traced(window.add(index, t_ns))
            self.traced += 1
            window.complete = self._enough(window)
            if window.complete and not self._overlong():
                self.close()

    def step_begins(self, t_ns):
        """The next step begins: the time before, an evaluation or the end of an epoch, is no part of it."""
        self.cost.last_ns = None
        if self.window is not None:
            self.window.last_ns = max(self.window.last_ns, t_ns)

    def open(self, tracer):
        if self.ending is not None and self._takes_long() and not self.ending.over():
            return  # its file is being written, for seconds: later steps will do
        asked_ns = self._clock_ns()
        self.settle()
        ready = getattr(tracer, "ready", None)
        if ready is not None and not ready():
            return  # at a later step
        try:
            session = tracer.start()
        except tracers.ProfilerBusy as refusal:
            return self._refused(refusal)
        begin_ns = self._clock_ns()
        name = "%s-%d-%d" % (tracer.FRAMEWORK, self.pid, self.windows)
        self.window = Window(tracer, session, os.path.join(self.settings.folder, name), asked_ns, begin_ns)
        self.cost.started((begin_ns - asked_ns) * 1e-9)

    def close(self):
        """Close the window that is open, if any, and keep it, unless it should have steps and has none."""
        window = self.window
        if window is None:
            return
        may_stop = getattr(window.tracer, "may_stop", None)
        if may_stop is not None and not may_stop():
            window.complete = True  # the next step closes it, or the watch
            return
        self.window = None
        ended = self.done
        self.done = ended or (0 < self.settings.steps <= self.traced)
        end_ns = self._clock_ns()
        source = self.source
        try:
            os.makedirs(self.settings.folder, exist_ok=True)
        except OSError:
            window.discard()
            raise
        aside = getattr(window.tracer, "stop_aside", None)
        if aside is not None:
            # By the time it is written, the plan may follow another source.
            self.ending = aside(
                window.session,
                window.path,
                lambda facts, resumed_ns: self._keep(window, source, end_ns, resumed_ns, facts),
            )
            if self.ending is not None:
                self.ending_s = (end_ns - window.begin_ns) * 1e-9
                self.cost.stopped((self._clock_ns() - end_ns) * 1e-9)
                return
        try:
            facts = window.tracer.stop(window.session, window.path)
        except tracers.ProfilerBusy as refusal:
            self.traced -= len(window.steps)
            self.done = ended
            self._broken += 1
            if self._broken == _MOST_BROKEN:
                raise
            return self._refused(refusal)
        except BaseException:
            window.remove()
            raise
        resumed_ns = self._clock_ns()
        self.cost.stopped((resumed_ns - end_ns) * 1e-9)
        self._keep(window, source, end_ns, resumed_ns, facts or {})

    def _keep(self, window, source, end_ns, resumed_ns, facts):
        """The window's file is written: keep it with a note of what it is, unless nothing is in it."""
        stopped_ns = self._clock_ns()
        kept = False
        try:
            length_s = (end_ns - window.begin_ns) * 1e-9
            # A background thread takes processors from the program, if not its time.
            self.cost.spent_s += (stopped_ns - resumed_ns) * 1e-9 / (os.cpu_count() or 1)
            if source is None:
                self.cost.sliced(length_s)
            elif not window.steps:
                return
            if facts is None:
                return
            self.bytes_per_s = os.path.getsize(window.path) / max(length_s, 1e-3)
            window.note(source, end_ns, resumed_ns, stopped_ns, facts)
            self.windows += 1
            kept = True
        finally:
            if not kept:
                window.remove()

    def settle(self):
        """Wait until the last window's file is written."""
        if self.ending is not None:
            self.ending.wait()  # after a KeyboardInterrupt the program's end waits again
            self.ending = None

    def interrupted(self):
        """Something other than steps goes on for a while."""
        self.cost.last_ns = None
        if self.source is not None:
            self.close()

    def overdue(self):
        """Whether no step will end the window: the loop is over, or waits for something."""
        window = self.window
        if window is None:
            return False
        if self.source is None:
            return True  # a slice that began too late for whoever asked for it
        waited_s = (self._clock_ns() - window.last_ns) * 1e-9
        return waited_s > max(_OVERDUE_S, 20 * self.cost.longest_s)

    def give_up(self):
        """Something went wrong: trace nothing more, and leave no profiler running."""
        self.done = self.failed = True
        window, self.window = self.window, None
        if window is not None:
            window.discard()

    def slice_affordable(self, length_s):
        budget = self.settings.budget
        elapsed_s = (self._clock_ns() - self._begin_ns) * 1e-9
        return budget is None or self.cost.forecast_s(0, True) + length_s <= budget * elapsed_s

    def used(self):
        """Whether a profiler has run in this process, ours or the program's own."""
        ours = self.windows > 0 or self.window is not None or self.ending is not None
        return ours or self.failed or self.refusal is not None

    def _refused(self, refusal):
        """The program runs a profiler of its own; try again at a later step."""
        self.refusal = refusal.with_traceback(None)  # which would keep the program's frames
        self._next = self.seen + self._wait
        self._wait = min(2 * self._wait, _LONGEST_WAIT)

    def _follow(self, source):
        """Whether to follow, from now on, a source that was not followed."""
        if self.source not in (None, FORWARD):
            self._others += 1
            if source == FORWARD or self._others < _SILENT:
                return False
            if self.traced or self.window is not None:
                self.close()
                return False
        # So far there was a slice, or calls of a model now trained, or a training that ended early.
        self.close()
        if self.window is not None:
            return False  # it cannot be closed just now
        if self.source is not None:
            self.seen = self.traced = self._next = 0
            self.done = self.failed
            self.cost.of_other_steps()
        self.source = source
        return True

    def _takes_long(self):
        """Whether writing the last window's file may. Who wants every step waits even so."""
        return self.settings.steps > 0 and self.ending_s > _SHORT_S

    def _overlong(self):
        """Whether windows run into the next step. PyTorch's mark comes inside the optimizer's step, whose own
        record would be lost if the profiler stopped there."""
        return self.source.startswith("torch")

    def _enough(self, window):
        if 0 < self.settings.steps <= self.traced:
            return True
        most_s = _FIRST_WINDOW_S if self.bytes_per_s is None else _MOST_BYTES / max(self.bytes_per_s, 1.0)
        if (window.last_ns - window.begin_ns) * 1e-9 >= most_s:
            return True
        return not self._affordable()

    def _affordable(self):
        budget = self.settings.budget
        if budget is None:
            return True
        opening = self.window is None
        left = self.settings.steps - self.traced if self.settings.steps else _WORTHWHILE
        steps = min(left, _WORTHWHILE) if opening else 1
        cost_s = self.cost.forecast_s(steps + self._overlong(), opening)
        return cost_s <= budget * self.cost.elapsed_s(self._clock_ns())


class Window:
    """One window: what it saw, and the files it leaves."""

    def __init__(self, tracer, session, base, asked_ns, begin_ns):
        self.tracer, self.session = tracer, session
        self.path, self.noted = base + tracer.SUFFIX, base + ".meta.json"
        self.asked_ns = asked_ns
        self.begin_ns = self.last_ns = begin_ns
        self.steps = []  # (index, begin, end)
        self.complete = False

    def add(self, index, t_ns):
        """Add a step; returns its length in seconds."""
        begin_ns, self.last_ns = self.last_ns, t_ns
        self.steps.append((index, begin_ns, t_ns))
        return (t_ns - begin_ns) * 1e-9

    def note(self, source, end_ns, resumed_ns, stopped_ns, facts):
        """Write beside the raw file what it is of."""
        meta = {
            "framework": self.tracer.FRAMEWORK,
            "format": self.tracer.FORMAT,
            "suffix": self.tracer.SUFFIX,
            "rank": marks.rank(),
            "pid": os.getpid(),
            "begin_ns": self.begin_ns,
            "end_ns": end_ns,
            "asked_ns": self.asked_ns,
            "resumed_ns": resumed_ns,
            "stopped_ns": stopped_ns,
            "source": source,
            "steps": self.steps,
        }
        meta.update(facts)
        with open(self.noted, "w") as file:
            json.dump(meta, file)

    def remove(self):
        """Remove what it may have written: a full disk has better use for the space."""
        _remove(self.path, self.path + ".tmp", self.noted)

    def discard(self):
        """End it, and keep nothing."""
        # Kineto complains on stderr of what it cannot write, so it gets a folder that is there.
        path = self.path
        try:
            folder = tempfile.mkdtemp()  # ours alone: nobody has put a link there
            path = os.path.join(folder, os.path.basename(path))
        except OSError:
            folder = ""
        try:
            self.tracer.stop(self.session, path)
        except Exception:
            pass
        _remove(path)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _remove(*paths):
    for path in paths:
        try:
            os.remove(path)
        except OSError:
            pass


class WindowCost:
    """How much longer the program takes because it is traced."""

    def __init__(self):
        self.first_ns = None
        self.last_ns = None
        self.lengths_s = []  # of the latest untraced steps
        self.longest_s = 0.0
        self.spent_s = 0.0
        self.slower_s = None  # by how much a traced step is slower than an untraced one
        self.start_s = None  # how long the profiler took to start, the last time
        self.stop_s = None
        self.guess_s = None  # what both may take, while nobody knows

    def untraced(self, t_ns):
        """A step ended."""
        if self.first_ns is None:
            self.first_ns = t_ns
        elif self.last_ns is not None:
            length_s = (t_ns - self.last_ns) * 1e-9
            self._saw(length_s)
            self.lengths_s.append(length_s)
            del self.lengths_s[:-_KEPT]
        self.last_ns = t_ns

    def traced(self, length_s):
        self._saw(length_s)
        self.slower_s = max(0.0, length_s - self.typical_s())
        self.spent_s += self.slower_s

    def started(self, length_s):
        self.start_s = length_s
        self._paused(length_s)

    def stopped(self, length_s):
        self.stop_s = length_s
        self._paused(length_s)

    def sliced(self, length_s):
        """A slice counts whole: nobody knows how much of it the program would have needed anyway."""
        self.spent_s += length_s

    def of_other_steps(self):
        """Steps are others from now on, and may be longer or shorter."""
        self.last_ns, self.lengths_s, self.slower_s = None, [], None

    def typical_s(self):
        return sorted(self.lengths_s)[len(self.lengths_s) // 2] if self.lengths_s else 0.0

    def elapsed_s(self, now_ns):
        return 0.0 if self.first_ns is None else (now_ns - self.first_ns) * 1e-9

    def forecast_s(self, steps, opening):
        """What will have been spent once so many more steps and the window's end are over."""
        slower_s = self.typical_s() if self.slower_s is None else self.slower_s
        pause_s = self._guess_s() if self.stop_s is None else self.stop_s
        if opening and self.stop_s is not None:
            pause_s += self.start_s
        return self.spent_s + steps * slower_s + pause_s

    def _guess_s(self):
        if self.guess_s is None:  # looked up once: it takes a millisecond or two
            self.guess_s = _GUESSED_PAUSE_GPU_S if tracers.gpu_in_use() else _GUESSED_PAUSE_S
        return self.guess_s

    def _paused(self, length_s):
        self.spent_s += length_s
        self.last_ns = None  # the step in which it happened tells nothing

    def _saw(self, length_s):
        self.longest_s = max(self.longest_s, length_s)
