"""The Pareto front: settings that no other beats in both time and energy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pareto(time_s: npt.ArrayLike, energy_j: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Indices of the front, by rising time. Of two settings with both alike, both are on it or neither."""
    time, energy = np.asarray(time_s, dtype=np.float64), np.asarray(energy_j, dtype=np.float64)
    order = np.lexsort((energy, time))
    kept: list[int] = []
    least = np.inf
    for i in order:
        alike = bool(kept) and time[i] == time[kept[-1]] and energy[i] == energy[kept[-1]]
        if energy[i] < least or alike:
            kept.append(int(i))
            least = min(least, float(energy[i]))
    return np.array(kept, dtype=np.int64)
