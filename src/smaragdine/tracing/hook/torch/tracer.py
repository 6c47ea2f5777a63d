"""A window of PyTorch's own profiler, with the path of every module called in it.

Kineto records operators and kernels. What it does not know, the module, comes from annotations.
"""

import functools
import os
import threading
import time

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from .. import marks
from ..state import process
from . import background_stop, compiled, detach, graphs, sessions

FRAMEWORK, FORMAT, SUFFIX = "torch", "kineto", ".json"

_state = process.torch


def ready():
    """Whether a profiler may begin: the last one is over, and what it has heard of too."""
    if graphs.going_on():
        return False
    ending = _state.ending
    if ending is not None:
        ending.wait()
    return detach.has_left() and (ending is None or ending.forgotten())


def may_stop():
    return not graphs.going_on()


def start():
    """Begin profiling; raises, having changed nothing, where the program would notice."""
    if not ready():
        raise RuntimeError("another thread is in one operator since the last window")
    if [int(part) for part in torch.__version__.split(".")[:2]] < [2, 2]:
        raise NotImplementedError("PyTorch %s; operations are traced from 2.2 on" % torch.__version__)
    return sessions.begun()


def at_next_call(work):
    """Have `work` done by the program's main thread, when it calls a module next; a function to take it back.

    Begun by another thread than the one that imported PyTorch, Kineto complains on stderr.
    """

    def once(module, args):
        if torch.compiler.is_compiling() or threading.current_thread() is not threading.main_thread():
            return
        if graphs.going_on():
            return  # at a later one
        take_back()
        work()

    def around(original):
        @functools.wraps(original)
        def __call__(self, *args, **kwargs):
            once(self, args)
            return original(self, *args, **kwargs)

        return __call__

    _state.hooked = not compiled.used()
    take_back = (
        register_module_forward_pre_hook(once).remove if _state.hooked else compiled.around_calls(around)
    )
    return take_back


def still_safe():
    """Whether what waits for the next call may go on waiting: torch.compile would see a hook."""
    return not (_state.hooked and compiled.used())


def stop(session, path):
    """End it and write Kineto's JSON to `path`; what else is known. Raises if there is nothing to write."""
    results = session.end()
    if results is None:
        raise session.abandoned or RuntimeError("the trace was ended before")
    results.save(path)
    if not os.path.exists(path):  # Kineto only logs what went wrong
        raise OSError("the profiler could not write %s" % path)
    return _facts(session)


def stop_aside(session, path, then):
    """The same beside the program, where that can be: what to wait for, or None. Then `then` is called, by
    another thread, with what else is known (None: nothing was written) and when the program went on."""
    inside = session.silence()
    if inside is None or not session.let_go():
        return None
    if torch.cuda.is_initialized():
        graphs.wait_for_gpu()
        background_stop.leave_gpu()
    facts = _facts(session)
    sessions.say_stopped()
    resumed_ns = time.time_ns()

    def written():
        session.forget()
        exists = os.path.exists(path)  # Kineto only logs what went wrong
        then(facts if exists else None, resumed_ns)
        if not exists:
            raise OSError("the profiler could not write %s" % path)

    _state.ending = background_stop.Ending(inside, path, written)
    return _state.ending


def _facts(session):
    calls = session.calls
    facts = {"edges": [list(edge) for edge in list(calls.edges)], "marked": bool(session.marked)}
    # A slice may have begun in the middle of a step, of which nobody can tell what belongs where. It counts
    # from the first whole call on.
    if calls.whole_ns is not None:
        facts["begin_ns"] = calls.whole_ns
    try:
        known = compiled.facts()
        if known is not None:
            facts["compiled"] = known
    except Exception as exception:
        marks.error("torch", exception)
    return facts
