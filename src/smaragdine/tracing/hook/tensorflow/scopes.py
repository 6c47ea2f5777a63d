"""What TensorFlow is told, and tells, of the layers in a function: their names, and how data flows between
them.

Keras 3 opens a layer's scope anew each time the layer is called, and TensorFlow numbers a scope that was open
before: `net_1/first_1`. The number cannot be told from one that is part of a name. So where the run is
traced, we enter a scope again by its whole name while a function with gradients is being written, and
TensorFlow numbers the operations in it instead. Functions without gradients stay as they are, and with them
those that are saved and served.

Where nothing is made into a function, TensorFlow's profiler knows no scopes: while it runs, they leave an
event of their own around what is done in them.
"""

import functools
import re
import weakref

from .. import environment, marks, wrapping
from ..state import process

MARK = "smaragdine:"
BACKWARD = "gradient_tape"

_VALID = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")

_MOST_OPERATIONS = 200000
_NO_FLOW = frozenset({"Const", "Placeholder", "ReadVariableOp", "VarHandleOp", "NoOp", "Shape"})
_PRODUCTS = frozenset(
    {"MatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv3D", "DepthwiseConv2dNative"}
)
_LONGEST_FUSION = 4  # product, bias, sum, activation

_state = process.tensorflow
_state.roots = weakref.WeakKeyDictionary()
_state.graph_facts = weakref.WeakKeyDictionary()


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
            # The function has gradients: a tape runs while it is being written.
            if not (eager or pywrap_tfe.TFE_Py_TapeSetIsEmpty()) and _VALID.fullmatch(self.name):
                above = tensorflow.get_current_name_scope()
                whole = above + "/" + self.name if above else self.name
                _note(tensorflow.compat.v1.get_default_graph(), whole.partition("/")[0])
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
    """From now until `close`, scopes and gradients leave events in the profiler."""

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


def _note(graph, root):
    """`root` is an outermost scope of a function that is being written, and whose gradients are wanted."""
    _state.roots.setdefault(graph, set()).add(root)


def graph_facts():
    """Of all functions with gradients. edges: [[source, target], …] between sibling scopes. fusions:
    {operation: [[product, …], …]}, the chains of operations that lead from a product to that operation in
    another scope, with which they may be fused."""
    edges, fusions = {}, {}
    for graph, roots in list(_state.roots.items()):
        if graph not in _state.graph_facts:
            _state.graph_facts[graph] = _read(graph, roots)
        edges.update(_state.graph_facts[graph][0])
        fusions.update(_state.graph_facts[graph][1])
    return {"edges": [list(edge) for edge in edges], "fusions": fusions}


def _read(graph, roots):
    edges, fusions = {}, {}
    operations = graph.get_operations()
    for operation in operations if len(operations) <= _MOST_OPERATIONS else ():
        if not _carries_data(operation, roots):
            continue
        if operation.type in _PRODUCTS:
            _fusions(operation, roots, fusions)
        for tensor in operation.inputs:
            if _carries_data(tensor.op, roots):
                _add_edge(tensor.op.name, operation.name, edges)
    return edges, fusions


def _carries_data(operation, roots):
    return operation.type not in _NO_FLOW and operation.name.partition("/")[0] in roots


def _add_edge(source, target, edges):
    above, below = source.split("/"), target.split("/")
    for i, (one, other) in enumerate(zip(above, below), start=1):
        if one != other:
            # An edge between two operations of one scope tells nothing of layers.
            if i < len(above) or i < len(below):
                edges["/".join(above[:i]), "/".join(below[:i])] = None
            return


def _fusions(product, roots, fusions):
    scope = product.name.rpartition("/")[0]
    chain = [product]
    while len(chain) < _LONGEST_FUSION:
        users = [user for user in chain[-1].outputs[0].consumers() if user.name.partition("/")[0] in roots]
        if len(users) != 1:
            return
        if users[0].name.rpartition("/")[0] != scope:
            fusions.setdefault(users[0].name, []).append([operation.name for operation in chain])
        chain.append(users[0])
