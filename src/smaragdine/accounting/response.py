"""What a sensor's electronics do to the power they show, undone.

A sample need not be the mean over the time since the last one. An H200's are taken every 20 ms from a signal
that a low-pass of first order has smoothed, and that comes late; their stamps are later still when the driver
was busy. With smoothing of time constant τ and readings v, Δ apart,

    v_i = a v_(i-1) + (1 - a) u_i        a = exp(-Δ / τ)

where u_i is a mean of the power between the two readings alone, weighted towards the second one. So what was
smoothed comes back, reading by reading, and no energy is lost: the sum of u is that of v but for its ends.
"""

from __future__ import annotations

import numpy as np

from smaragdine.arrays import Floats, Ints

_REACH = 2  # readings on either side that tell when one was taken
_LEAST = 0.6  # of the usual spacing; of readings closer to each other one says next to nothing new


def sharp(t_ns: Ints, power_w: Floats, lag_ns: float, smoothing_ns: float) -> tuple[Ints, Floats]:
    """The ends of the time that each mean is over, which begins where the one before ends; and the means.

    Readings by rising time; fewer come back where some are too close to each other.
    """
    if t_ns.size < 2 * _REACH + 1:
        return t_ns - round(lag_ns), power_w
    t_ns = on_time(t_ns)
    spacing_ns = float(np.median(np.diff(t_ns)))
    kept = _apart(t_ns, _LEAST * spacing_ns)
    t_ns, power_w = t_ns[kept], power_w[kept]
    since_ns = np.diff(t_ns)
    stays = np.exp(-since_ns / smoothing_ns)
    means_w = (power_w[1:] - stays * power_w[:-1]) / (1 - stays)
    # Noise may take it below nothing where power falls.
    means_w = np.concatenate([power_w[:1], np.maximum(means_w, 0.0)])
    # Weighted towards its end, a mean is of a time that lies later than the middle.
    typical = np.exp(-spacing_ns / smoothing_ns)
    centre_ns = smoothing_ns - spacing_ns * typical / (1 - typical)
    return t_ns - round(lag_ns - (spacing_ns / 2 - centre_ns)), means_w


def on_time(t_ns: Ints) -> Ints:
    """When readings of an even rhythm were taken, whose stamps are late now and then: the median of what each
    and its neighbours say."""
    spacing_ns = int(np.median(np.diff(t_ns)))
    here = np.arange(t_ns.size)[:, None]
    # At either end the nearest ones.
    others = np.clip(here - _REACH, 0, t_ns.size - 2 * _REACH - 1) + np.arange(2 * _REACH + 1)
    said_ns = t_ns[others] - (others - here) * spacing_ns - t_ns[0]  # small: a median is a float
    return t_ns[0] + np.maximum.accumulate(np.median(said_ns, axis=1).astype(np.int64))


def _apart(t_ns: Ints, least_ns: float) -> Ints:
    """Those to keep, so that none follows the one before it within `least_ns`."""
    close = np.flatnonzero(np.diff(t_ns) < least_ns) + 1
    kept = np.ones(t_ns.size, dtype=np.bool_)
    before = 0  # the last one kept
    for i in close.tolist():
        before = i - 1 if kept[i - 1] else before
        kept[i] = t_ns[i] - t_ns[before] >= least_ns
    return np.flatnonzero(kept)
