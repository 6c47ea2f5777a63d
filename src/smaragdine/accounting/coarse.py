"""A power trace with fewer stretches, for whoever draws it: the same energy, over the same time."""

from __future__ import annotations

import dataclasses

import numpy as np

from smaragdine.accounting.power import PowerTrace


def coarse(trace: PowerTrace, most: int) -> PowerTrace:
    """About `most` stretches at their mean power, neighbours joined; none reaches over a gap."""
    count = trace.start_ns.size
    if count <= most:
        return trace
    after_gap = np.concatenate([[True], trace.start_ns[1:] != trace.end_ns[:-1]])
    since_gap = np.arange(count) - np.maximum.accumulate(np.where(after_gap, np.arange(count), 0))
    first = np.flatnonzero(since_gap % -(-count // most) == 0)
    last = np.append(first[1:], count) - 1
    length_ns = trace.end_ns - trace.start_ns
    power_w = np.add.reduceat(trace.power_w * length_ns, first) / np.add.reduceat(length_ns, first)
    return dataclasses.replace(
        trace, start_ns=trace.start_ns[first], end_ns=trace.end_ns[last], power_w=power_w
    )
