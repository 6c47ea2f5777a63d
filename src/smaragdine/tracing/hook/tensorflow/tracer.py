"""A window of TensorFlow's own profiler, for Keras on TensorFlow."""

import glob
import os
import shutil
import sys
import tempfile
import time

from .. import keras, marks
from ..state import process
from ..tracers import ProfilerBusy
from ..xplane import FORMAT, SUFFIX, XplaneSession, check_unused, write
from . import scopes

FRAMEWORK = "tensorflow"
__all__ = ["FORMAT", "FRAMEWORK", "SUFFIX", "start", "stop"]


class _Level(int):
    """TensorFlow takes a number that can be a truth value for one, and ignores it. This one cannot."""

    def __bool__(self):
        raise TypeError("a level")


# 3, for the default leaves out details, and operations that have turned out to be cheap count as such.
_OPTIONS = {
    "host_tracer_level": _Level(3),
    "python_tracer_level": _Level(0),
    "device_tracer_level": _Level(1),
}


def start():
    """Begin profiling; raises, having changed nothing, where the program would notice."""
    from tensorflow.python.profiler import profiler_v2
    from tensorflow.python.profiler.internal import _pywrap_profiler as module

    if getattr(profiler_v2, "_profiler", None) is not None:
        raise ProfilerBusy("a TensorFlow profiler is running already")
    check_unused(module)
    _wait()
    # The profiler makes the folder when it exports.
    folder = os.path.join(tempfile.gettempdir(), "smaragdine-xplane-%d-%d" % (os.getpid(), time.time_ns()))
    profiler = module.ProfilerSession()
    profiler.start(folder, _OPTIONS)
    session = XplaneSession(module, profiler)
    session.folder = folder
    session.events = _events()
    return session


def stop(session, path):
    """End the session and write its raw file; raises where there is nothing to write."""
    if session.events is not None:
        session.events.close()
    try:
        if session.profiler is not None:
            _wait()
        facts = write(session, path, lambda profiler, part: _export(profiler, session.folder, part))
    finally:
        shutil.rmtree(session.folder, ignore_errors=True)
    return dict(facts, **_facts())


def _facts():
    """What the raw file does not tell: whether a step is Keras' code alone, and the model's dataflow."""
    try:
        model = keras.trained_model()
        facts = scopes.graph_facts()
        facts["edges"] += [] if model is None else keras.layer_edges(model)
        return dict(facts, keras=keras.steps_itself(model), exact_scopes=process.tensorflow.exact)
    except Exception as exception:
        marks.error(FRAMEWORK, exception)
        return {}


def _events():
    try:
        return scopes.Events()
    except Exception as exception:
        marks.error(FRAMEWORK, exception)
        return None


def _export(profiler, folder, path):
    profiler.export_to_tb()
    found = glob.glob(os.path.join(glob.escape(folder), "**", "*.xplane.pb"), recursive=True)
    if len(found) != 1:
        raise RuntimeError("TensorFlow's profiler left %d files" % len(found))
    shutil.move(found[0], path)


def _wait():
    # Until the GPUs have done their work; on the CPU a step has ended when its call returns.
    tensorflow = sys.modules["tensorflow"]
    try:
        if tensorflow.executing_eagerly() and tensorflow.config.list_logical_devices("GPU"):
            tensorflow.test.experimental.sync_devices()
    except Exception:
        pass
