"""What our profiler would break in a program: its own profiler, and the capture of a CUDA graph.

A second profiler takes the place of the first, and stopping the first then crashes (torch 2.13). So ours ends
before the program's begins. The warm-up of a schedule lies between `_prepare_profiler` and
`_enable_profiler`; PyTorch tells nobody of it.

Whoever waits for the GPU while a CUDA graph is being captured, in any thread, breaks the capture.
"""

import functools
import weakref

import torch

from .. import marks, wrapping
from ..state import process

_state = process.torch
_state.graphs = weakref.WeakSet()


def patch_profiler(module):
    """`module`: torch.autograd.profiler."""
    wrapping.replace(module, "_prepare_profiler", functools.partial(_announced, True))
    wrapping.replace(module, "_enable_profiler", functools.partial(_announced, False))


def patch_graphs(module):
    """`module`: torch.cuda.graphs."""
    wrapping.replace(module.CUDAGraph, "capture_begin", _begin)
    wrapping.replace(module.CUDAGraph, "capture_end", _end)


def capturing():
    """Whether a CUDA graph is being captured."""
    # PyTorch itself answers for the thread that asks only, but also knows captures that Python did not begin.
    return torch.cuda.is_initialized() and (bool(_state.graphs) or torch.cuda.is_current_stream_capturing())


def wait_for_gpu():
    """Unless that would break a capture."""
    if torch.cuda.is_initialized() and not capturing():
        torch.cuda.synchronize()


def _announced(prepares, original):
    """Tells our session before the program prepares or begins a profiler of its own."""

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        for tell in _state.listening.copy():
            tell(prepares)
        _state.prepared = False
        result = original(*args, **kwargs)
        _state.prepared = prepares
        return result

    return wrapper


def _begin(original):
    @functools.wraps(original)
    def capture_begin(self, *args, **kwargs):
        try:
            _state.graphs.add(self)
        except Exception as exception:
            marks.error("torch", exception)
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            _state.graphs.discard(self)
            raise

    return capture_begin


def _end(original):
    @functools.wraps(original)
    def capture_end(self, *args, **kwargs):
        try:
            return original(self, *args, **kwargs)
        finally:
            _state.graphs.discard(self)

    return capture_end
