"""Whether a CUDA graph is being captured: whoever waits for the GPU meanwhile, in any thread, breaks it."""

import functools
import weakref

import torch

from .. import marks, wrapping
from ..state import process

_state = process.torch

_state.capturing = weakref.WeakSet()  # those that are; one that nobody ends is forgotten with its object


def patch_graphs(module):
    """`module`: torch.cuda.graphs."""
    wrapping.replace(module.CUDAGraph, "capture_begin", _begin)
    wrapping.replace(module.CUDAGraph, "capture_end", _end)


def going_on():
    # PyTorch itself knows of the thread that asks only, but also of captures that are not begun in Python.
    return torch.cuda.is_initialized() and (
        bool(_state.capturing) or torch.cuda.is_current_stream_capturing()
    )


def wait_for_gpu():
    """Unless that would break something."""
    if torch.cuda.is_initialized() and not going_on():
        torch.cuda.synchronize()


def _begin(original):
    @functools.wraps(original)
    def capture_begin(self, *args, **kwargs):
        try:
            _state.capturing.add(self)
        except Exception as exception:
            marks.error("torch", exception)
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            _state.capturing.discard(self)
            raise

    return capture_begin


def _end(original):
    @functools.wraps(original)
    def capture_end(self, *args, **kwargs):
        try:
            return original(self, *args, **kwargs)
        finally:
            _state.capturing.discard(self)

    return capture_end
