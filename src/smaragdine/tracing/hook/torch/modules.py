"""Annotates each call of a module in a window as `smaragdine:<path>`, and finds the dataflow between modules.

Hooks on all modules annotate the calls. They would make torch.compile compile everything anew, for its guards
see hooks: where the program uses it, only the outermost calls of compiled modules are annotated.

The path of a module is its place in the outermost module called, by the name it has there.

Dataflow comes from one call of each outermost module. What a module returns is known by its node in the
autograd graph, or by itself where it has none. From what another module is given, we walk the graph back to
the nearest nodes so known: their modules feed this one. Nothing is kept when the outermost call ends.
"""

import functools
import re
import sys
import threading
import time
import warnings
import weakref

import torch
import torch.autograd.profiler as profiler
from torch.nn.modules.module import _global_forward_hooks_with_kwargs as _with_kwargs
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .. import marks, training
from ..state import process
from . import compiled

_state = process.torch

PREFIX = "smaragdine:"
# OptimizedModule warns of hooks like ours, and with -W error the warning would end the program.
_FILTER = (
    "ignore",
    re.compile(r"Using `torch\.compile\(module\)` when there are global hooks"),
    UserWarning,
    None,
    0,
)

# Modules that only stand around the user's own, and what they call it.
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
_WRAPPED = frozenset(name for name in _WRAPPERS.values() if name != "module")
_MOST_CHANGES = 100  # of a model in a window: looking through it costs time

_MOST_NODES = 2000  # walked for one call: what lies further away is no part of this model
_DEEPEST = 4  # of lists and dictionaries with tensors in them


class Calls:
    """What one window learns of the modules called in it."""

    def __init__(self):
        self.threads = threading.local()
        self.callers = {}  # thread that calls modules -> its calls under way: (module, path, annotation)
        self.whole_ns = None  # when the first outermost call began
        self.paths = Paths()
        self.edges = _state.edges
        self.handles = []
        self.take_back = None

    def follow_compiled(self):
        self.take_back = compiled.around_calls(_around)
        _state.calls = self

    def follow(self):
        warnings.filters.insert(0, _FILTER)  # warnings.filterwarnings would show again what was shown once
        self.handles.append(register_module_forward_pre_hook(_enter))
        self.handles.append(register_module_forward_hook(_leave, with_kwargs=True, always_call=True))
        _state.calls = self

    def let_go(self):
        """Annotates nothing of the program's from now on."""
        if _state.calls is self:
            _state.calls = None
        while self.handles:
            handle = self.handles.pop()
            handle.remove()
            _with_kwargs.pop(handle.id, None)  # the handle leaves this behind (torch 2.13)
        if self.take_back is not None:
            self.take_back()
        if _FILTER in warnings.filters:
            warnings.filters.remove(_FILTER)
        # Those of other threads too: nobody else would end them, and only those that end are recorded.
        for stack in list(self.callers.values()):
            _unwind(stack, 0)

    def forget_threads(self):
        """In a forked child, which has none of its parent's threads: their annotations are not its own."""
        self.threads, self.callers = threading.local(), {}

    def thread_state(self):
        """The calls under way in this thread, and the dataflow between them."""
        try:
            return self.threads.state
        except AttributeError:
            stack = self.callers.setdefault(threading.get_ident(), [])
            self.threads.state = (stack, Edges(_state.edges_done, self.edges))
            return self.threads.state


def _annotation(name):
    fast = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    return profiler.record_function(name) if fast is None else fast(name)


def _enter(module, args):
    # torch.compile takes this for a constant, and compiles an empty function.
    if torch.compiler.is_compiling():
        return
    calls = _state.calls
    try:
        if calls is not None and torch._C._get_tracing_state() is None:
            stack, edges = calls.thread_state()
            if calls.whole_ns is None and not stack and not calls_under_way():
                calls.whole_ns = time.time_ns()
            path = calls.paths.of(module, stack)
            edges.enter(path, args, len(stack))
            _push(calls, stack, module, path)
    except Exception as exception:
        if _state.calls is calls:  # else another thread has ended it meanwhile, and emptied the stack
            marks.error("torch", exception)


def _leave(module, args, *rest):
    if torch.compiler.is_compiling():
        return
    calls = _state.calls
    try:
        if calls is not None:
            stack, edges = calls.thread_state()
            # Calls above it may have ended unnoticed, by a KeyboardInterrupt for one.
            for depth in range(len(stack) - 1, -1, -1):
                if stack[depth][0] is module:
                    path = stack[depth][1]
                    _unwind(stack, depth)
                    # `rest` is keyword arguments and the output; after an error, the output alone (torch
                    # 2.13).
                    edges.leave(path, rest[0] if len(rest) > 1 else None, rest[-1], depth)
                    break
    except Exception as exception:
        if _state.calls is calls:  # else another thread has ended it meanwhile, and emptied the stack
            marks.error("torch", exception)


def _around(original):
    @functools.wraps(original)
    def __call__(self, *args, **kwargs):
        calls = None if torch.compiler.is_compiling() else _state.calls
        if calls is None or in_call():
            return original(self, *args, **kwargs)
        depth = _begin(calls, self)
        try:
            return original(self, *args, **kwargs)
        finally:
            _unwind(calls.thread_state()[0], depth)

    return __call__


def _begin(calls, module):
    """Returns how many calls of this thread were under way before this one."""
    stack = calls.thread_state()[0]
    depth = len(stack)
    try:
        calls.whole_ns = calls.whole_ns or time.time_ns()
        _push(calls, stack, module, calls.paths.of(module, stack))
    except Exception as exception:
        marks.error("torch", exception)
    return depth


def _push(calls, stack, module, path):
    annotation = _annotation(PREFIX + path)
    annotation.__enter__()
    stack.append((module, path, annotation))
    if _state.calls is not calls:  # another thread has ended it meanwhile
        _unwind(stack, 0)


def _unwind(stack, depth):
    while len(stack) > depth:
        try:
            annotation = stack.pop()[2]
        except IndexError:
            return  # another thread unwinds it too
        annotation.__exit__(None, None, None)


class Paths:
    def __init__(self):
        self.known = {}  # id of a module -> (weak reference to it, its path)
        self.roots = {}  # name -> weak reference to the outermost module of that name
        self.changes = 0

    def of(self, module, stack):
        """`stack` holds the calls under way, outermost first: (module, path, …)."""
        path = self._known(module)
        if stack and _is_keras(module):
            # It may be called from several places. As with Keras, its path begins with its caller's.
            if path is None:
                self._register(module, below(stack[-1][1], own_name(module)))
            return below(stack[-1][1], own_name(module))
        if path is not None and (self.changes == _MOST_CHANGES or _in_place(module, path, stack)):
            return path
        if path is not None:
            self.changes += 1  # modules have changed places
            self._register(stack[0][0], stack[0][1])
        elif not stack:
            # Called by itself later (recomputed in backward, say), a part is known by its place here.
            under_way = calls_under_way()
            root = under_way[0] if under_way else _whole(module)
            self._register(root, self._root_name(root))
            if self._known(module) is None:
                self._register(module, below(self._known(root), own_name(module)))
        elif type(module).__name__ == "GraphModule":
            return stack[-1][1]  # a compiler made it from the module that calls it
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
                continue  # a Keras layer has a name of its own, the same on every backend
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
    """The modules whose calls this thread is in, outermost first, without the one being entered."""
    return _calls()[:0:-1]


def in_call():
    """Whether this thread is in the call of any module."""
    return bool(_calls())


def _calls():
    """The same, innermost first. Only frames tell: calls may have begun before the window did."""
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
    """Whether the module that calls it still has it where its path says; True if nobody can tell."""
    if not stack or not path.startswith(stack[-1][1] + "/"):
        return True
    place = stack[-1][0]
    for part in path[len(stack[-1][1]) + 1 :].split("/"):
        place = getattr(place, "_modules", {}).get(part)
        if place is None:
            return True  # a wrapper lies in between, or the model does not know the module
    return place is module


def below(path, name):
    """A Keras model may have an empty name; it then has no scope of its own."""
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


class Edges:
    """The dataflow that one thread sees."""

    def __init__(self, done, found):
        self.done = done  # paths of outermost modules already seen through, in this process
        self.found = found  # (source, target) -> None, in order
        self.root = None  # path of the outermost module at hand
        self._forget()

    def _forget(self):
        self.nodes = {}  # autograd node -> path of the module that returned it
        self.tensors = {}  # id -> (weak reference, path), for tensors without a node

    def enter(self, path, args, depth):
        if not depth:
            self._forget()
            self.root = None if path in self.done else path
        elif self.root is not None:
            self._feed(path, args)

    def leave(self, path, kwargs, output, depth):
        if self.root is None:
            return
        if depth:
            if kwargs:
                self._feed(path, kwargs)  # pre-hooks for all modules do not get them
            self._returned(path, output)
        else:
            if output is not None:  # None: it raised
                self.done.add(self.root)
            self.root = None
            self._forget()

    def _returned(self, path, output):
        for tensor in tensors_in(output):
            node = tensor.grad_fn
            if node is not None:
                self._produced(self.nodes, node, self.nodes.get(node), path, path)
            else:
                entry = self.tensors.get(id(tensor))
                known = entry[1] if entry is not None and entry[0]() is tensor else None
                self._produced(self.tensors, id(tensor), known, path, (weakref.ref(tensor), path))

    @staticmethod
    def _produced(where, key, known, path, value):
        # What a part returns and its parent passes on stays the part's. What only went through a module
        # unchanged becomes that module's.
        if known is None or not known.startswith(path + "/"):
            where[key] = value

    def _feed(self, path, inputs):
        walk, seen = [], set()
        for tensor in tensors_in(inputs):
            if tensor.grad_fn is not None:
                walk.append(tensor.grad_fn)
                continue
            for whole in (tensor, tensor._base):
                entry = None if whole is None else self.tensors.get(id(whole))
                if entry is not None and entry[0]() is whole:
                    self._add(entry[1], path)
        while walk and len(seen) < _MOST_NODES:
            node = walk.pop()
            if node in seen:
                continue
            seen.add(node)
            source = self.nodes.get(node)
            if source is not None:
                self._add(source, path)
            else:
                walk.extend(before for before, _ in node.next_functions if before is not None)

    def _add(self, source, target):
        """An edge lies between two children of the lowest parent that source and target share."""
        a, b = source.split("/"), target.split("/")
        shared = 0
        while shared < min(len(a), len(b)) and a[shared] == b[shared]:
            shared += 1
        if shared < min(len(a), len(b)):  # else one is inside the other
            self.found["/".join(a[: shared + 1]), "/".join(b[: shared + 1])] = None


def tensors_in(value, depth=0):
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEEPEST:
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, (list, tuple)):
            return
        for part in value:
            for tensor in tensors_in(part, depth + 1):
                yield tensor
