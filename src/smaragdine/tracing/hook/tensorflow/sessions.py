"""TensorFlow 1 sessions, plain and monitored: their steps as marks, and windows over them.

While a window is open, we ask each run of a step for its statistics, and hide them from the program. Without
GPUs software statistics will do. They need no profiler, so the program may run one of its own meanwhile.
"""

import functools
import os
import re
import shutil
import tempfile
import threading
import time

from .. import environment, marks, training, wrapping
from ..state import process

SOURCE = "tensorflow"

# How TensorFlow names the runs of initializers and savers; a layer called `initial` is none.
_HOUSEKEEPING = re.compile(
    r"(init(_all_(tables|vars))?|save|report_uninitialized\w*|VarIsInitializedOp)(_\d+)?([/:]|$)"
)

_RUN_ARGUMENTS = {"fetches", "feed_dict", "options", "run_metadata"}

FRAMEWORK, FORMAT, SUFFIX = "tensorflow", "step_stats", ".step_stats.pb"

_SOFTWARE, _FULL = 1, 3  # RunOptions.TraceLevel

_state = process.tensorflow


def patch_session(module):
    wrapping.replace(module.BaseSession, "run", lambda original: _run(_is_step, _traced(original)))


def patch_monitored_session(module):
    session = module._MonitoredSession
    wrapping.replace(session, "run", functools.partial(_run, _is_step))
    wrapping.replace(session, "run_step_fn", functools.partial(_run, lambda fetches: True))
    # A session restores, initializes and asks for the global step when it opens, and saves when it closes.
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
        # Marked only now: a run that raises because it found the input exhausted was no step.
        if step:
            _mark(begin_ns, time.time_ns())
        return result

    return run


def _traced(original):
    """Traces every run inside a step: a monitored session hands the step down, and its hooks may run more."""

    @functools.wraps(original)
    def run(self, *args, **kwargs):
        window = _open_window()
        if window is None or not getattr(_state.thread, "step", False):
            return original(self, *args, **kwargs)
        theirs = wrapping.argument(args, kwargs, 3, "run_metadata")
        ours = None
        try:
            options = wrapping.argument(args, kwargs, 2, "options")
            if len(args) <= 4 and not set(kwargs) - _RUN_ARGUMENTS:
                ours = _options_for(window, self, options)
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
            _keep(window, ours[1], theirs)
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


def start():
    """Open a window; raises, having changed nothing, where one is open already."""
    if _open_window() is not None:
        raise RuntimeError("a trace of ours is running already")
    _state.window = SessionWindow()
    return _state.window


def stop(window, path):
    """Close the window and write its raw file; raises where there is nothing to write."""
    if _state.window is window:
        _state.window = None
    try:
        with window.lock:
            window.file.close()
        if window.error is not None:
            raise window.error
        if window.refused and not window.runs:
            raise RuntimeError("the program asks its sessions for traces of its own")
        if not window.runs:
            raise RuntimeError("no session ran a step")
        shutil.move(window.part, path)
    finally:
        if os.path.exists(window.part):
            os.remove(window.part)
    return {"refused_runs": window.refused} if window.refused else {}


def _open_window():
    """None in a forked child: its parent's file is not its own."""
    window = _state.window
    return window if window is not None and window.pid == os.getpid() else None


def _options_for(window, session, options):
    """Options and metadata of ours for a run; None where the program traces it itself."""
    if options is not None and options.trace_level:
        window.refused += 1
        return None
    if session.sess_str:
        raise NotImplementedError("sessions on other machines cannot be traced")
    from tensorflow.core.protobuf import config_pb2

    asked = config_pb2.RunOptions()
    if options is not None:
        asked.CopyFrom(options)
    asked.trace_level = window.level(session)
    return asked, config_pb2.RunMetadata()


def _keep(window, metadata, run_metadata):
    """Gives the program its metadata as it would be without us, and keeps the statistics."""
    if run_metadata is not None:
        theirs = type(metadata)()
        theirs.CopyFrom(metadata)
        theirs.ClearField("step_stats")
        run_metadata.ParseFromString(theirs.SerializeToString())
    window.add(metadata)


def _varint(number):
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


class SessionWindow:
    """The statistics of a window's runs, in a file that grows while the window is open."""

    def __init__(self):
        folder = os.environ.get(environment.FOLDER) or tempfile.gettempdir()
        os.makedirs(folder, exist_ok=True)
        self.pid = os.getpid()
        self.part = os.path.join(folder, "sessions-%d-%d.part" % (self.pid, time.time_ns()))
        self.file = open(self.part, "wb")  # noqa: SIM115
        self.lock = threading.Lock()  # sessions may run in several threads
        self.levels = {}  # session's id → trace level
        self.runs = 0
        self.refused = 0  # runs with a trace of the program's own
        self.error = None

    def add(self, metadata):
        """Appends a run as field 1 of one long message, so that none stays in memory."""
        data = metadata.step_stats.SerializeToString()
        with self.lock:
            if not self.file.closed:
                self.file.write(b"\x0a" + _varint(len(data)) + data)
                self.runs += 1

    def level(self, session):
        level = self.levels.get(id(session))
        if level is None:
            gpus = [device for device in session.list_devices() if device.device_type == "GPU"]
            level = self.levels[id(session)] = _FULL if gpus else _SOFTWARE
        return level
