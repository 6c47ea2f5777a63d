"""Layers keep their names in what Keras 3 makes of a model for TensorFlow.

Keras opens a layer's scope anew each time the layer is called, and TensorFlow numbers a scope that was open
before: `net_1/first_1`. The number cannot be told from one that is part of a name. So while a function with
gradients is written, and only where the run is traced, a scope is entered again by its whole name, and the
operations in it are numbered. Functions without gradients, those that are saved and served among them,
stay as they are.

Where nothing is made into a function, TensorFlow's profiler knows of no scopes: while it runs, they leave an
event of their own around what is done in them.
"""

import functools
import re

from .. import environment, marks, wrapping
from ..state import process
from . import graph

_state = process.tensorflow

MARK = "smaragdine:"
BACKWARD = "gradient_tape"

_VALID = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


def patch_scopes(module):
    """`module`: keras.src.backend.tensorflow.core."""
    if environment.trace_wanted():
        from tensorflow.python import pywrap_tfe

        wrapping.replace(module.name_scope, "__enter__", functools.partial(_enter, module.tf, pywrap_tfe))
        wrapping.replace(module.name_scope, "__exit__", _exit)


def _enter(tensorflow, pywrap_tfe, original):
    @functools.wraps(original)
    def enter(self):
        eager = True
        try:
            eager = tensorflow.executing_eagerly()
            # A tape of gradients runs while the function is written.
            if not (eager or pywrap_tfe.TFE_Py_TapeSetIsEmpty()) and _VALID.fullmatch(self.name):
                above = tensorflow.get_current_name_scope()
                whole = above + "/" + self.name if above else self.name
                graph.note(tensorflow.compat.v1.get_default_graph(), whole.partition("/")[0])
                self._tf_name_scope = tensorflow.name_scope(whole + "/")
                _state.exact = True
        except Exception as exception:
            marks.error("keras", exception)
        result = original(self)
        event = _state.event
        if event is not None and eager and getattr(self, "_pop_on_exit", False):
            self._smaragdine_event = event(MARK + tensorflow.get_current_name_scope())
            _state.exact = True
        return result

    return enter


def _exit(original):
    @functools.wraps(original)
    def exit(self, *args, **kwargs):
        event = vars(self).pop("_smaragdine_event", None)
        if event is not None:
            event.Stop()
        return original(self, *args, **kwargs)

    return exit


class Events:
    """Events of scopes and of gradients, from now until they are closed."""

    def __init__(self):
        from tensorflow.python.eager import backprop
        from tensorflow.python.profiler.internal import _pywrap_traceme

        self._tape = backprop.GradientTape
        self._original = self._tape.gradient
        _state.event = _pywrap_traceme.TraceMe
        self._wrapper = self._tape.gradient = _gradient(_state.event, self._original)

    def close(self):
        _state.event = None
        if self._tape.gradient is self._wrapper:
            self._tape.gradient = self._original


def _gradient(event, original):
    @functools.wraps(original)
    def gradient(self, *args, **kwargs):
        around = event(MARK + BACKWARD)
        try:
            return original(self, *args, **kwargs)
        finally:
            around.Stop()

    return gradient
