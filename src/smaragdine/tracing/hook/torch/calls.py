"""Each call of a module as an annotation `smaragdine:<path>` in the trace, by hooks on all modules.

Not where the program uses torch.compile: its guards see the hooks, and it would compile everything anew.
There only the calls of compiled modules are annotated, as far as they are outermost.
"""

import functools
import re
import threading
import time
import warnings

import torch
import torch.autograd.profiler as profiler
from torch.nn.modules.module import _global_forward_hooks_with_kwargs as _with_kwargs
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .. import marks
from ..state import process
from . import compiled, edges, paths

_state = process.torch

PREFIX = "smaragdine:"
# OptimizedModule warns when there are hooks like ours; with -W error the warning would end the program.
_FILTER = (
    "ignore",
    re.compile(r"Using `torch\.compile\(module\)` when there are global hooks"),
    UserWarning,
    None,
    0,
)


class Calls:
    """What one window learns of the modules called in it."""

    def __init__(self):
        self.threads = threading.local()
        self.callers = {}  # thread that calls modules -> its calls under way: (module, path, annotation)
        self.whole_ns = None  # when the first outermost call began
        self.paths = paths.Paths()
        self.edges = _state.edges
        self.handles = []
        self.take_back = None

    def follow_compiled(self):
        self.take_back = compiled.around_calls(_around)
        _state.calls = self

    def follow(self):
        warnings.filters.insert(0, _FILTER)  # filterwarnings would show again what was shown once
        self.handles.append(register_module_forward_pre_hook(_enter))
        self.handles.append(register_module_forward_hook(_leave, with_kwargs=True, always_call=True))
        _state.calls = self

    def let_go(self):
        """From now on nothing of the program's is annotated any more."""
        if _state.calls is self:
            _state.calls = None
        while self.handles:
            handle = self.handles.pop()
            handle.remove()
            _with_kwargs.pop(handle.id, None)  # which the handle forgets (torch 2.13)
        if self.take_back is not None:
            self.take_back()
        if _FILTER in warnings.filters:
            warnings.filters.remove(_FILTER)
        # Also those of other threads, which nobody would end: they are recorded only when they are.
        for stack in list(self.callers.values()):
            _unwind(stack, 0)

    def forget_threads(self):
        """A forked child has none of them, and their annotations are not its own."""
        self.threads, self.callers = threading.local(), {}

    def thread_state(self):
        """The calls under way in this thread, and the dataflow between them."""
        try:
            return self.threads.state
        except AttributeError:
            stack = self.callers.setdefault(threading.get_ident(), [])
            self.threads.state = (stack, edges.Edges(_state.edges_done, self.edges))
            return self.threads.state


def _annotation(name):
    fast = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    return profiler.record_function(name) if fast is None else fast(name)


def _enter(module, args):
    # A constant under torch.compile, which then sees an empty function.
    if torch.compiler.is_compiling():
        return
    calls = _state.calls
    try:
        if calls is not None and torch._C._get_tracing_state() is None:
            stack, edges = calls.thread_state()
            if calls.whole_ns is None and not stack and not paths.calls_under_way():
                calls.whole_ns = time.time_ns()
            path = calls.paths.of(module, stack)
            edges.enter(path, args, len(stack))
            _push(calls, stack, module, path)
    except Exception as exception:
        if _state.calls is calls:  # or another thread has ended it meanwhile, and emptied the stack
            marks.error("torch", exception)


def _leave(module, args, *rest):
    if torch.compiler.is_compiling():
        return
    calls = _state.calls
    try:
        if calls is not None:
            stack, edges = calls.thread_state()
            # Calls above it were left without a word, by a KeyboardInterrupt for one.
            for depth in range(len(stack) - 1, -1, -1):
                if stack[depth][0] is module:
                    path = stack[depth][1]
                    _unwind(stack, depth)
                    # Keyword arguments and the output; after an error the output alone (torch 2.13).
                    edges.leave(path, rest[0] if len(rest) > 1 else None, rest[-1], depth)
                    break
    except Exception as exception:
        if _state.calls is calls:  # or another thread has ended it meanwhile, and emptied the stack
            marks.error("torch", exception)


def _around(original):
    @functools.wraps(original)
    def __call__(self, *args, **kwargs):
        calls = None if torch.compiler.is_compiling() else _state.calls
        if calls is None or paths.in_call():
            return original(self, *args, **kwargs)
        depth = _begin(calls, self)
        try:
            return original(self, *args, **kwargs)
        finally:
            _unwind(calls.thread_state()[0], depth)

    return __call__


def _begin(calls, module):
    """How many calls of this thread were under way before it."""
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
