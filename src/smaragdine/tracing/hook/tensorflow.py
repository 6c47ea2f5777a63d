"""Steps of TensorFlow 1 sessions, plain and monitored."""

import functools
import re
import threading
import time

from . import marks, training, wrapping

SOURCE = "tensorflow"

# Runs of initializers and savers, as TensorFlow names them; a layer called `initial` is not one.
_HOUSEKEEPING = re.compile(
    r"(init(_all_(tables|vars))?|save|report_uninitialized\w*|VarIsInitializedOp)(_\d+)?([/:]|$)"
)

_thread = threading.local()
_steps = 0


def patch_session(module):
    wrapping.replace(module.BaseSession, "run", functools.partial(_run, _is_step))


def patch_monitored_session(module):
    session = module._MonitoredSession
    wrapping.replace(session, "run", functools.partial(_run, _is_step))
    wrapping.replace(session, "run_step_fn", functools.partial(_run, lambda fetches: True))
    # It restores, initializes and asks for the global step when it opens, and saves when it closes.
    wrapping.replace(session, "__init__", functools.partial(_run, lambda fetches: False))
    wrapping.replace(session, "_close_internal", functools.partial(_run, lambda fetches: False))


def _run(is_step, original):
    @functools.wraps(original)
    def run(self, *args, **kwargs):
        depth = getattr(_thread, "depth", 0)
        step = depth == 0 and _counts(is_step, args, kwargs)
        _thread.depth = depth + 1
        begin_ns = time.time_ns()
        try:
            result = original(self, *args, **kwargs)
        finally:
            _thread.depth = depth
        # Marked when done: the run that finds the input exhausted, and raises, was no step.
        if step:
            _mark(begin_ns, time.time_ns())
        return result

    return run


def _counts(is_step, args, kwargs):
    try:
        return not training.active() and is_step(wrapping.argument(args, kwargs, 0, "fetches"))
    except Exception as exception:
        marks.error(SOURCE, exception)
        return False


def _mark(begin_ns, end_ns):
    global _steps
    index = _steps
    _steps += 1
    marks.soon(begin_ns, "step_begin", index, SOURCE)
    marks.soon(end_ns, "step_end", index, SOURCE)


def _is_step(fetches):
    if isinstance(fetches, dict):
        return any(_is_step(fetch) for fetch in fetches.values())
    if isinstance(fetches, (list, tuple)):
        return any(_is_step(fetch) for fetch in fetches)
    name = fetches if isinstance(fetches, str) else getattr(fetches, "name", "")
    return not _HOUSEKEEPING.match(name)
