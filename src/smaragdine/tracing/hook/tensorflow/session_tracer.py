"""A window of TensorFlow 1 sessions: while it is open, each run of a step is asked for statistics of itself.

The program does not see them. Without GPUs software statistics do, which need no profiler: one of the
program's own is not in the way.
"""

import os
import shutil
import tempfile
import threading
import time

from ..state import process

_state = process.tensorflow

FRAMEWORK = "tensorflow"
FORMAT = "step_stats"
SUFFIX = ".step_stats.pb"

_SOFTWARE, _FULL = 1, 3  # RunOptions.TraceLevel


class SessionWindow:
    def __init__(self):
        folder = os.environ.get("SMARAGDINE_TRACE_FOLDER") or tempfile.gettempdir()
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
        """Appended as field 1 of one long message, so that no run stays in memory."""
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


def start():
    """Begin to ask; raises, having changed nothing, where a window is open already."""
    if current() is not None:
        raise RuntimeError("a trace of ours is running already")
    _state.window = SessionWindow()
    return _state.window


def stop(window, path):
    """End it and write the raw file; raises where there is nothing to write."""
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


def current():
    """The open window. A forked child has none: its parent's file is not its own."""
    window = _state.window
    return window if window is not None and window.pid == os.getpid() else None


def options_for(window, session, options):
    """Options and metadata of our own for a run, or None where it is not ours to trace."""
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


def keep(window, metadata, run_metadata):
    """The program's metadata as it would be without us, and the statistics for us."""
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
