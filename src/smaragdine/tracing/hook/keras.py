"""Marks of Keras 3 (TensorFlow, JAX and PyTorch backends), Keras 2 and tf_keras.

We add no callback. In Keras 3, an `async_safe` one runs on a pool of threads, later; any other stops the
asynchronous dispatch of all callbacks. In tf_keras, one that handles batches can have every batch's logs
copied to the host. But `fit` tells its CallbackList of every batch, on its own thread, whether anybody
listens or not. So we wrap the methods of the list itself. The training thread takes the stamps, after the
callbacks of a batch's beginning and before those of its end, and neither the user's callbacks nor the model
know of it.

Where a backend only enqueues work (JAX, GPUs), a step's marks say when it was handed to the device.
"""

import functools
import sys
import time
import weakref

from . import environment, marks, training, wrapping
from .state import process

_DEEPEST = 32  # models within models, and operations that are no layers

_state = process.keras


def patch_callbacks(module):
    lists = getattr(module, "CallbackList", None)
    if lists is None:
        return
    source = _source(module)

    def wrap(method, before=None, after=None):
        wrapping.around(lists, method, before, after, source)

    wrap("on_train_begin", before=functools.partial(_train_begin, source))
    wrap("on_train_end", after=functools.partial(_end, "train", source))
    wrap("on_epoch_begin", before=functools.partial(_epoch_begin, source))
    wrap("on_epoch_end", after=functools.partial(_epoch_end, source))
    wrap("on_train_batch_begin", after=functools.partial(_step_begin, source))
    wrap("on_train_batch_end", before=functools.partial(_step_end, source))
    wrap("on_test_begin", before=functools.partial(_begin, "evaluate", source))
    wrap("on_test_end", after=functools.partial(_end, "evaluate", source))
    wrap("on_predict_begin", before=functools.partial(_begin, "predict", source))
    wrap("on_predict_end", after=functools.partial(_end, "predict", source))
    # Graph mode of tf_keras leaves the public batch methods out.
    wrap(
        "_call_batch_hook",
        before=functools.partial(_graph_batch, "end", source),
        after=functools.partial(_graph_batch, "begin", source),
    )


def patch_trainer(module):
    source = _source(module)
    for name in ("TensorFlowTrainer", "JAXTrainer", "TorchTrainer", "Model"):
        trainer = vars(module).get(name)
        if trainer is not None and trainer.__module__ == module.__name__:
            for method in ("fit", "evaluate", "predict"):
                wrapping.replace(trainer, method, functools.partial(_closing, source))


def trained_model():
    """The model that is being trained, or None."""
    callbacks = _state.open["train"]() if "train" in _state.open else None
    return getattr(callbacks, "model", None)


def steps_itself(model):
    """Whether Keras alone says what is done in a step of this model: no method of it is the program's."""
    if model is None:
        return False
    methods = [getattr(type(model), name, None) for name in ("train_step", "compute_loss")]
    modules = [method.__module__ for method in methods if method is not None]  # older ones have no second
    return all(module.partition(".")[0] in ("keras", "tf_keras") for module in modules)


def layer_edges(model):
    """How data flows between the layers of a functional model and of the models in it: [[source, target], …],
    paths of layers from the model's name down."""
    found = {}
    _collect(model, model.name, found, _DEEPEST)
    return [list(edge) for edge in found]


def patch_optimizer(module):
    """Tells PyTorch's profiler of steps of Keras' optimizers, as PyTorch's own optimizers do. Else they would
    be operations like any other. Compiled code stays as it is."""
    if environment.trace_wanted() and module.backend.backend() == "torch":
        wrapping.replace(module.BaseOptimizer, "apply", _named_step)


def _named_step(original):
    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        with torch.profiler.record_function("Optimizer.step#%s.step" % type(self).__name__):
            return original(self, *args, **kwargs)

    return wrapper


def _source(module):
    return "tf_keras" if module.__name__.startswith("tf_keras") else "keras"


def _closing(source, original):
    """Ends what an exception leaves open, so that we see the next training again."""

    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        before = dict(_state.open)
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            _abandon(source, before)
            raise

    return wrapper


def _abandon(source, before):
    try:
        for kind in [kind for kind in _state.open if _state.open[kind] is not before.get(kind)]:
            callbacks = _state.open.pop(kind)()
            if kind == "train" and callbacks is not None:
                training.end(callbacks)
            marks.mark(kind + "_end", source=source, detail={"error": wrapping.failing()})
    except Exception as exception:
        marks.error(source, exception)


def _begin(kind, source, callbacks, args, kwargs, total=None):
    # A list inside a list is part of what is open, and so is a model that a callback of another one runs.
    if kind not in _state.open or _state.open[kind]() is None:
        _state.open[kind] = weakref.ref(callbacks)
        marks.mark(kind + "_begin", source=source, total=total)


def _end(kind, source, callbacks, args, kwargs):
    if kind in _state.open and _state.open[kind]() is callbacks:
        del _state.open[kind]
        if kind != "train" or training.end(callbacks):
            marks.mark(kind + "_end", source=source)


def _train_begin(source, callbacks, args, kwargs):
    if training.begin(callbacks):
        _state.open.pop("train", None)
        _state.base, _state.done, _state.ended = 0, 0, None
        total = (getattr(callbacks, "params", None) or {}).get("epochs")
        _begin("train", source, callbacks, args, kwargs, total=total)


def _epoch_begin(source, callbacks, args, kwargs):
    if training.owns(callbacks):
        _state.base = _state.done
        marks.mark("epoch_begin", wrapping.argument(args, kwargs, 0, "epoch"), source=source)


def _epoch_end(source, callbacks, args, kwargs):
    if training.owns(callbacks):
        marks.mark("epoch_end", wrapping.argument(args, kwargs, 0, "epoch"), source=source)


def _step_begin(source, callbacks, args, kwargs):
    if training.owns(callbacks):
        index = _state.base + wrapping.argument(args, kwargs, 0, "batch")
        if index >= _state.done:
            _state.done = index + 1
            marks.soon(time.time_ns(), "step_begin", index, source)


def _step_end(source, callbacks, args, kwargs):
    # With steps_per_execution, one call covers several steps and its end names the last of them.
    if training.owns(callbacks):
        index = _state.base + wrapping.argument(args, kwargs, 0, "batch")
        if index != _state.ended:
            _state.ended = index
            _state.done = index + 1
            marks.soon(time.time_ns(), "step_end", index, source)


def _graph_batch(which, source, callbacks, args, kwargs):
    mode, hook = wrapping.argument(args, kwargs, 0, "mode"), wrapping.argument(args, kwargs, 1, "hook")
    if mode == "train" and hook == which:
        step = _step_begin if which == "begin" else _step_end
        step(source, callbacks, args[2:], kwargs)


def _collect(layer, path, found, depth):
    # A Sequential model keeps a functional one inside, which has no name of its own in a path.
    functional = getattr(layer, "_functional", None) or layer
    for node in _nodes(functional):
        target = _operation(node)
        if not _is_layer(target):
            continue
        for source in _layers_before(node, _DEEPEST):
            if source is not target:
                found[_below(path, source.name), _below(path, target.name)] = None
    if depth:
        for child in layer._flatten_layers(include_self=False, recursive=False):
            _collect(child, _below(path, child.name), found, depth - 1)


def _below(path, name):
    """A model may have an empty name, and then no scope of its own."""
    return path + "/" + name if path else name


def _nodes(functional):
    by_depth = getattr(functional, "_nodes_by_depth", None) or {}
    return [node for nodes in by_depth.values() for node in nodes]


def _layers_before(node, depth):
    """Layers whose output a node takes, through operations that are no layers and leave no scope."""
    for parent in node.parent_nodes:
        if _is_layer(_operation(parent)):
            yield _operation(parent)
        elif depth:
            for source in _layers_before(parent, depth - 1):
                yield source


def _operation(node):
    return getattr(node, "operation", None) or node.layer  # tf_keras


def _is_layer(operation):
    return hasattr(operation, "weights") and type(operation).__name__ != "InputLayer"
