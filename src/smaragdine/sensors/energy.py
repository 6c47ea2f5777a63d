"""What readings say about energy: which time each one covers, and which ones are impossible.

The daemon's running totals and the accounting of a recording both follow these rules, so that the same
readings are the same joules.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from smaragdine.arrays import Bools, Floats, Ints
from smaragdine.sensors.base import Channel

# No device draws more, not even a server of eight GPUs behind one meter.
MOST_W = 20_000.0
# A sensor of a rail that is off may read this much below zero.
_OFF_W = 1.0
# An H200 stamps its 20 ms samples 7 to 47 ms apart. That is jitter: no time went unseen.
_JITTER = 2.5
# A counter that moves every 100 ms may move between two readings of the same millisecond.
_UPDATE_NS = 100_000_000


def hold_ns(channel: Channel) -> int:
    """How long a value holds: ten update periods, but no less than a quarter second, because a machine under
    load stalls that long."""
    return max(int(channel.period_ms * 1e7), 250_000_000)


def can_be(power_w: Floats) -> Bools:
    """Which powers a device may have. It gives no power back, though the sensor of one at rest may read a
    little below zero. A plug-in says with NaN that it does not know."""
    return np.isfinite(power_w) & (power_w >= -_OFF_W) & (power_w <= MOST_W)


def stretches(
    channel: Channel, t_ns: Ints, power_w: Floats, before: tuple[int, float] | None = None
) -> tuple[Ints, Ints, Floats]:
    """The time for which each sample of a channel stands, and its power: starts, ends, watts.

    Samples come by rising time; of one time the first counts. `before` is the last sample before them. A
    sample covers the window that it averages over. If it comes about when it is due, it covers all the time
    since the one before it: where the window is the end of its period (25 of 100 ms), nobody knows better. A
    power without a window holds until the next.
    """
    if before is not None:
        t_ns = np.concatenate([np.array([before[0]], dtype=np.int64), t_ns])
        power_w = np.concatenate([[before[1]], power_w])
    known = np.flatnonzero(can_be(power_w))
    t_ns, power_w = t_ns[known], power_w[known]
    later = np.ones(t_ns.size, dtype=np.bool_)
    later[1:] = np.diff(t_ns) > 0
    t_ns, power_w = t_ns[later], power_w[later]
    if channel.window_ms is None:
        kept = np.diff(t_ns) <= hold_ns(channel)
        return t_ns[:-1][kept], t_ns[1:][kept], power_w[:-1][kept]
    window_ns = int(channel.window_ms * 1e6)
    start_ns = t_ns - window_ns
    touches = np.diff(t_ns) <= _JITTER * max(window_ns, channel.period_ms * 1e6)
    start_ns[1:] = np.where(touches, t_ns[:-1], start_ns[1:])
    new = slice(0 if before is None else 1, None)
    return start_ns[new], t_ns[new], power_w[new]


def growth(
    total: npt.NDArray[Any], since_ns: Ints, wraps_at: float | None, joules: float | None
) -> tuple[npt.NDArray[Any], Bools]:
    """By how much a counter grew from each reading to the next, and where we know that.

    A counter that fell has wrapped round once; twice cannot be seen. If that would be more than any device
    uses (`joules` is what one count of it is), somebody has set the counter back. A jump of that size is no
    energy either.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what is beyond all numbers is beyond a device too
        grown = np.diff(total)
        fell = grown < 0
        if wraps_at is not None:
            grown = np.where(fell, grown + total.dtype.type(wraps_at), grown)
        known = (grown >= 0) & np.isfinite(grown)
        if joules is not None:
            # Counters that wrap round are those that move at every reading.
            least_ns = np.where(fell, 1, _UPDATE_NS)
            known &= grown * (joules * 1e9) <= MOST_W * np.maximum(since_ns, least_ns)
    return grown, known
