"""The path of a module: its place in the outermost module called, by the name it has there."""

import functools
import sys
import weakref

import torch

from .. import training

# Modules that only stand around the user's own, and what they call it.
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
_WRAPPED = frozenset(name for name in _WRAPPERS.values() if name != "module")
_MOST_CHANGES = 100  # of a model while it is traced; to look through it costs time


class Paths:
    def __init__(self):
        self.known = {}  # id of a module -> (weak reference to it, its path)
        self.roots = {}  # name -> weak reference to the outermost module of that name
        self.changes = 0

    def of(self, module, stack):
        """`stack` has the calls under way, outermost first: (module, path, …)."""
        path = self._known(module)
        if stack and _is_keras(module):
            # It may be called from several places. As on the other backends, its path is in its caller's.
            if path is None:
                self._register(module, below(stack[-1][1], own_name(module)))
            return below(stack[-1][1], own_name(module))
        if path is not None and (self.changes == _MOST_CHANGES or _in_place(module, path, stack)):
            return path
        if path is not None:
            self.changes += 1  # modules have changed places
            self._register(stack[0][0], stack[0][1])
        elif not stack:
            # A part called by itself later (recomputed in backward, say) is known by its place in this one.
            under_way = calls_under_way()
            root = under_way[0] if under_way else _whole(module)
            self._register(root, self._root_name(root))
            if self._known(module) is None:
                self._register(module, below(self._known(root), own_name(module)))
        elif type(module).__name__ == "GraphModule":
            return stack[-1][1]  # made by a compiler, where the program has the module it was made from
        else:
            self._register(stack[0][0], stack[0][1])  # a model may have grown since
            if self._known(module) is None:
                self._register(module, below(stack[-1][1], own_name(module)))
        return self._known(module)

    def _known(self, module):
        entry = self.known.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def _register(self, root, path):
        self.known[id(root)] = (weakref.ref(root), path)
        wrapped = _wrapped(root)
        if wrapped is not None:
            self._register(wrapped, path)
            return
        for name, module in root.named_modules():
            if name and _is_keras(module):
                continue  # a Keras layer has a name of its own, the same on all backends
            parts = [part for part in name.split(".") if part not in _WRAPPED]
            self.known[id(module)] = (weakref.ref(module), below(path, "/".join(parts)) if name else path)

    def _root_name(self, module):
        wrapped = module
        while wrapped is not None:
            module, wrapped = wrapped, _wrapped(wrapped)
        name = base = own_name(module)
        if getattr(module, "_is_replica", False):
            return name  # DataParallel's copies are one model
        number = 0
        while self.roots.get(name, _nobody)() not in (None, module):
            number += 1
            name = "%s_%d" % (base, number)
        self.roots[name] = weakref.ref(module)
        return name


def _whole(module):
    model = training.model()
    inside = isinstance(model, torch.nn.Module) and any(part is module for part in model.modules())
    return model if inside else module


def calls_under_way():
    """The modules whose calls this thread is in, outermost first, but for the one being entered."""
    return _calls()[:0:-1]


def in_call():
    """Whether this thread is in the call of any module."""
    return bool(_calls())


def _calls():
    """Only frames tell: calls may have begun before anybody followed them. The innermost first."""
    code = torch.nn.Module._call_impl.__code__
    found = []
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is code:
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module):
                found.append(module)
        frame = frame.f_back
    return found


def _in_place(module, path, stack):
    """Whether it still is where its path says, seen from the module that calls it; True if none can tell."""
    if not stack or not path.startswith(stack[-1][1] + "/"):
        return True
    place = stack[-1][0]
    for part in path[len(stack[-1][1]) + 1 :].split("/"):
        place = getattr(place, "_modules", {}).get(part)
        if place is None:
            return True  # a wrapper in between, or a module that the model does not know of
    return place is module


def below(path, name):
    """A Keras model may have an empty name, and then no scope of its own."""
    return "%s/%s" % (path, name) if path else name


def own_name(module):
    return str(module.name) if _is_keras(module) else type(module).__name__


def _is_keras(module):
    return _is_keras_type(type(module))


@functools.lru_cache(maxsize=None)
def _is_keras_type(kind):
    return any(each.__module__ == "keras.src.layers.layer" for each in kind.__mro__)


def _wrapped(module):
    name = _WRAPPERS.get(type(module).__name__)
    wrapped = None if name is None else getattr(module, name, None)
    return wrapped if isinstance(wrapped, torch.nn.Module) else None


def _nobody():
    return None
