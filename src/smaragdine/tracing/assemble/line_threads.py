"""Threads of the lines of an XPlane file.

A line's number is std::hash of the thread's handle, as libstdc++ computes it: MurmurHash64A of its 8 bytes
(TensorFlow 2.21, jaxlib 0.10). The hook tells the handles of the program's threads.
"""

from __future__ import annotations

from typing import Any

_BITS = (1 << 64) - 1
_FACTOR = 0xC6A4A7935BD1E995
_SEED = 0xC70F6907
# No kernel numbers its threads so high (2²² at most): a lane that is no thread's is not taken for one.
NO_THREAD = 1 << 22


def line_threads(meta: dict[str, Any]) -> dict[int, int]:
    """Line number → thread."""
    return {_hash(int(handle)): int(thread) for thread, handle in meta.get("threads") or ()}


def _hash(handle: int) -> int:
    mixed = _shifted(handle * _FACTOR & _BITS) * _FACTOR & _BITS
    mixed = ((_SEED ^ (8 * _FACTOR & _BITS)) ^ mixed) * _FACTOR & _BITS
    mixed = _shifted(_shifted(mixed) * _FACTOR & _BITS)
    return mixed - (1 << 64) if mixed >> 63 else mixed


def _shifted(bits: int) -> int:
    return bits ^ (bits >> 47)
