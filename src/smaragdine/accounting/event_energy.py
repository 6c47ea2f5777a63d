"""The energy of every single event, as the footprint shares it: rows are sums of these."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from smaragdine.accounting.account import power_of
from smaragdine.accounting.columns import Columns, blocks, columns, device_counts
from smaragdine.accounting.engine import chunks, in_threads, share, sum_by
from smaragdine.accounting.meters import Meter, Meters
from smaragdine.arrays import Floats


def event_energies_j(events: pa.Table, meters: Meters) -> Floats:
    """Per event, in the order of the table; nan where its device's power is not known while it ran.

    An event that others of its lane lie inside has what is left beside them.
    """
    numbers = pa.array(np.arange(events.num_rows))
    # Shares are asked for without steps, so that an event's number can travel in the place of its step.
    source = columns(events.set_column(events.schema.get_field_index("step"), "step", numbers))
    energy_j = np.full(events.num_rows, np.nan)
    for device in device_counts(source):
        if device in meters.of:
            _add_device(energy_j, source, device, meters.of[device])
    return energy_j


def _add_device(energy_j: Floats, source: Columns, device: str, meter: Meter) -> None:
    power = power_of(source, device, meter)
    edges_ns = power.edge_ns[[0, -1]].tolist() if power.edge_ns.size else []
    begin_ns, until_ns = min([source.first_ns, *edges_ns]), max([source.last_ns, *edges_ns])
    parts = chunks(blocks(source, device), begin_ns, until_ns)
    for chunk, shares in in_threads(lambda chunk: (chunk, share(chunk, power)), parts):
        count = chunk.start_ns.size
        added_j = sum_by(shares.of_pieces(np.arange(count)), shares.energy_j, count)
        known_ns = meter.trace.covered_until_ns(chunk.end_ns) - meter.trace.covered_until_ns(chunk.start_ns)
        # Without length an event uses nothing, whatever is known.
        some = (known_ns > 0) | (chunk.end_ns == chunk.start_ns)
        rows = chunk.step[some]
        energy_j[rows] = np.nan_to_num(energy_j[rows]) + added_j[some]
