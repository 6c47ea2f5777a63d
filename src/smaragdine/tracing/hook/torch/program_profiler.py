"""When the program prepares or begins a profiler of its own, and whether it has prepared one.

Between `_prepare_profiler` and `_enable_profiler` lies the warm-up of a schedule, of which PyTorch tells
nobody. A second profiler in it takes the place of the first, and to stop the first crashes (torch 2.13).
"""

import functools

from .. import wrapping
from ..state import process

_state = process.torch


def patch_profiler(module):
    wrapping.replace(module, "_prepare_profiler", functools.partial(_noting, True))
    wrapping.replace(module, "_enable_profiler", functools.partial(_noting, False))


def _noting(done, original):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        for tell in _state.listening.copy():
            tell(done)
        _state.prepared = False
        result = original(*args, **kwargs)
        _state.prepared = done
        return result

    return wrapper
