"""Steps of TensorFlow 1 sessions, plain and monitored."""

import functools
import re
import time

from .. import marks, training, wrapping
from ..state import process
from . import session_tracer

_state = process.tensorflow

SOURCE = "tensorflow"

# Runs of initializers and savers, as TensorFlow names them; a layer called `initial` is not one.
_HOUSEKEEPING = re.compile(
    r"(init(_all_(tables|vars))?|save|report_uninitialized\w*|VarIsInitializedOp)(_\d+)?([/:]|$)"
)

_RUN_ARGUMENTS = {"fetches", "feed_dict", "options", "run_metadata"}


def patch_session(module):
    wrapping.replace(module.BaseSession, "run", lambda original: _run(_is_step, _traced(original)))


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
        depth = getattr(_state.thread, "depth", 0)
        step = depth == 0 and _counts(is_step, args, kwargs)
        if depth == 0:
            _state.thread.step = step
        _state.thread.depth = depth + 1
        begin_ns = time.time_ns()
        try:
            result = original(self, *args, **kwargs)
        finally:
            _state.thread.depth = depth
        # Marked when done: the run that finds the input exhausted, and raises, was no step.
        if step:
            _mark(begin_ns, time.time_ns())
        return result

    return run


def _traced(original):
    """Every run inside a step: a monitored session hands the step down, and its hooks may run more."""

    @functools.wraps(original)
    def run(self, *args, **kwargs):
        window = session_tracer.current()
        if window is None or not getattr(_state.thread, "step", False):
            return original(self, *args, **kwargs)
        theirs = wrapping.argument(args, kwargs, 3, "run_metadata")
        ours = None
        try:
            options = wrapping.argument(args, kwargs, 2, "options")
            if len(args) <= 4 and not set(kwargs) - _RUN_ARGUMENTS:
                ours = session_tracer.options_for(window, self, options)
        except Exception as exception:
            window.error = exception
        if ours is None:
            return original(self, *args, **kwargs)
        fetches = {"fetches": kwargs["fetches"]} if "fetches" in kwargs else {}
        feed_dict = wrapping.argument(args, kwargs, 1, "feed_dict")
        result = original(
            self, *args[:1], feed_dict=feed_dict, options=ours[0], run_metadata=ours[1], **fetches
        )
        try:
            session_tracer.keep(window, ours[1], theirs)
        except Exception as exception:
            window.error = exception
        return result

    return run


def _counts(is_step, args, kwargs):
    try:
        return not training.active() and is_step(wrapping.argument(args, kwargs, 0, "fetches"))
    except Exception as exception:
        marks.error(SOURCE, exception)
        return False


def _mark(begin_ns, end_ns):
    index = _state.steps
    _state.steps += 1
    marks.soon(begin_ns, "step_begin", index, SOURCE)
    marks.soon(end_ns, "step_end", index, SOURCE)


def _is_step(fetches):
    if isinstance(fetches, dict):
        return any(_is_step(fetch) for fetch in fetches.values())
    if isinstance(fetches, (list, tuple)):
        return any(_is_step(fetch) for fetch in fetches)
    name = fetches if isinstance(fetches, str) else getattr(fetches, "name", "")
    return not _HOUSEKEEPING.match(name)
