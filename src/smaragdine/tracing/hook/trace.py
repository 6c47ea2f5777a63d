"""When a process traces itself: a few steps, or a few slices of time where it announces none.

The framework's own profiler runs for a window and writes its raw file beside the recording. Another process
finds names and phases in it after the program has ended. A process follows its steps by the marks it makes
anyway. A thread watches for programs that make none, and for windows that no step ends.
"""

import _thread
import atexit
import os
import sys
import time

from . import install as installed
from . import environment, marks, tracers, training, windows
from .state import process

_state = process.trace


_SLICE_S = 1.0
_SLICES = 5
_LONGEST_WAIT_S = 5.0  # for the program to call a module
_TICK_S = 0.25
# Marks that end a step, or void the time before them.
_TELLING = frozenset({"step_end", "train_end", "train_begin", "epoch_begin", "evaluate_end", "predict_end"})
_INTERRUPTING = frozenset({"evaluate_begin", "predict_begin"})
_LEAST_LOAD = 0.1  # cores: a launcher that waits for others has nothing to trace


def install():
    """Follow the steps of this process, if its environment asks for that."""
    settings = environment.settings_of(os.environ)
    if settings is not None:
        begin(settings)


def begin(settings):
    """Trace from now on, after finishing what was traced before."""
    finish()
    _state.settings, _state.plan = settings, windows.WindowPlan(settings)
    process.marks.follower = marked
    if any(name in sys.modules for name in installed.FRAMEWORKS):
        framework_loaded()


def end():
    """Finish what is open, and follow no steps any longer."""
    finish()
    _state.settings = None
    process.marks.follower = None


def framework_loaded(module=None):
    """A framework was imported: from now on the process may have work to trace."""
    if _state.settings is not None and _state.watching != (os.getpid(), _state.settings):
        if _state.watching is None:
            # Registered after the framework's own, and so called before that cleans up what we need.
            atexit.register(at_exit)
        _state.watching = (os.getpid(), _state.settings)
        # Not by `threading`: a program may join every thread that it finds there.
        _thread.start_new_thread(_watch, (_state.plan,))


def marked(name, index, source, t_ns):
    """The process has marked something; follows what it says of its training."""
    if _state.settings is None or not (name in _TELLING or name in _INTERRUPTING):
        return
    plan = _state.plan if _state.plan.pid == os.getpid() else _plan_of_child()
    told = _alone(plan, lambda: _tell(plan, name, index, source, t_ns))
    # Calls of a model go on being followed: should it be trained, they give way to that.
    if told and plan.done and plan.window is None and plan.source != training.FORWARD:
        process.marks.follower = None  # from now on a step costs what it costs without us


def finish():
    """Keep what was traced, and trace nothing more: the program ends, or the training."""
    plan = _state.plan
    if plan is not None and plan.pid == os.getpid():
        _alone(plan, lambda: _finish(plan))


def at_exit():
    # If a signal's exception ended this early, the process would end under a thread at work in the framework.
    while True:
        try:
            detach = sys.modules.get("%s.torch.detach" % __package__)
            if detach is not None:
                detach.program_ends()
            finish()
            if detach is not None:
                detach.leave()
            return
        except (KeyboardInterrupt, SystemExit):
            pass


def _plan_of_child():
    """In a forked child, which traces nothing where its parent did: that profiler is not its own. Nor is the
    lock, which it may find held."""
    used = _state.plan.used()
    _state.lock, _state.postponed = _thread.RLock(), []
    _state.plan = windows.WindowPlan(_state.settings)
    _state.plan.done = _state.plan.failed = used
    if _is_worker():
        # It ends by _exit, without the functions that atexit knows.
        sys.modules["multiprocessing.util"].Finalize(None, _worker_ends, exitpriority=0)
    return _state.plan


def _worker_ends():
    at_exit()
    marks.flush()


def _tell(plan, name, index, source, t_ns):
    if name == "step_end":
        plan.step_ended(source, index, t_ns)
    elif name == "train_end":
        plan.close()  # saving the model is part of no step
    elif name in _INTERRUPTING:
        plan.interrupted()
    else:
        plan.step_begins(t_ns)


def _finish(plan):
    plan.done = True
    _try(plan, plan.close)
    _try(plan, plan.settle)
    if plan.refusal is not None and not plan.windows:
        marks.error("trace", plan.refusal)


def _alone(plan, work):
    """Do `work`, one thread at a time; returns whether it was done. A signal's handler may interrupt its own
    thread in this, and would wait for itself: what the handler wants is done afterwards."""
    if _state.lock._is_owned():
        _state.postponed.append((plan, work))
        return False
    with _state.lock:
        _try(plan, work)
        while _state.postponed:
            _try(*_state.postponed.pop(0))
    return True


def _try(plan, work):
    try:
        work()
    except Exception as exception:
        plan.give_up()
        marks.error("trace", exception)


def _watch(plan):
    """Watch until the process ends, or the plan is done."""
    try:
        load = _Load()
        next_s = time.monotonic() + plan.settings.quiet_s
        taken = 0
        while _follows(plan):
            time.sleep(_TICK_S)
            busy = load.cores() >= _LEAST_LOAD
            with _state.lock:
                if plan.overdue():
                    _try(plan, plan.close)
            if plan.source is not None or taken == _SLICES or time.monotonic() < next_s:
                continue
            if training.active() or _is_worker() or not plan.slice_affordable(_SLICE_S):
                continue
            framework = tracers.in_use()
            # A JAX program may rest itself while a device works on what it was given.
            if framework is not None and (busy or framework == "jax"):
                _take_slice(plan, tracers.named(framework))
                taken += 1
                # Closer at first, for short programs; a long one should not pay for many.
                next_s = time.monotonic() + plan.settings.quiet_s * 2 ** (taken - 1)
    except Exception as exception:
        marks.error("trace", exception)


def _follows(plan):
    return (
        _state.plan is plan and _state.settings is plan.settings and plan.pid == os.getpid() and not plan.done
    )


def _take_slice(plan, tracer):
    if _done_by(plan, tracer, lambda: plan.open(tracer), _LONGEST_WAIT_S):
        time.sleep(_SLICE_S)
        if not _done_by(plan, tracer, plan.close, _SLICE_S):
            with _state.lock:
                if plan.source is None:
                    _try(plan, plan.close)


def _done_by(plan, tracer, work, most_s):
    """Do `work`, in a thread of the program's where the tracer needs one; returns whether it was done."""
    done = []

    def guarded():
        # Called from the program's own code: whoever holds the lock may be further up this stack.
        lock = _state.lock
        if plan.pid != os.getpid() or lock._is_owned():
            return
        try:
            if lock.acquire(False) and plan.source is None and _follows(plan):
                _try(plan, work)
                done.append(True)
        finally:
            # Ask, for a signal's exception may have come just before the lock was taken, or just after.
            if lock._is_owned():
                lock.release()

    at_next_call = getattr(tracer, "at_next_call", None)
    if at_next_call is None:
        guarded()
        return bool(done)
    take_back = at_next_call(guarded)
    until_s = time.monotonic() + most_s
    while not done and time.monotonic() < until_s and plan.source is None and _follows(plan):
        time.sleep(_TICK_S / 10)
        if not tracer.still_safe():
            break
    take_back()
    return bool(done)


def _is_worker():
    """Whether this process is a worker, a DataLoader's for one: it helps the program that trains, and only
    imports the framework."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


class _Load:
    """Cores this process kept busy since it was last asked."""

    def __init__(self):
        self.wall_s, self.cpu_s = time.monotonic(), time.process_time()

    def cores(self):
        wall_s, cpu_s = time.monotonic(), time.process_time()
        load = (cpu_s - self.cpu_s) / max(wall_s - self.wall_s, 1e-3)
        self.wall_s, self.cpu_s = wall_s, cpu_s
        return load
