"""Events in columns: files of them, and tables that are in memory already."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.arrow import pc
from smaragdine.errors import UserError
from smaragdine.recording.format import EVENTS
from smaragdine.recording.tables import (
    MOST_NS,
    MOST_T_NS,
    TEXT,
    as_table,
    constant,
    need_columns,
    read_table,
    refuse,
    text,
    whole,
    words_column,
)

# The phase of an operation, if its name alone tells.

PHASES = ("forward", "backward", "optimizer")
FORWARD, BACKWARD, OPTIMIZER = range(3)

# What tf.function, Keras and jax.jit put before the path of the program's own scopes.
_WRAPPERS = re.compile(r"^(?:StatefulPartitionedCall(?:_\d+)?/|jit\([^()]*\)/|train_step/)+")
_BACKWARD = re.compile(r"^(?:gradients(?:_\d+)?/|gradient_tape/)|\btranspose\(")
_OPTIMIZERS = (
    "adadelta|adafactor|adagrad|adam|adamax|adam_?w|ftrl|gradientdescent|lamb|lion|loss_?scale_?optimizer|momentum|muon"
    "|nadam|optimizer|rmsprop|sgd"
)
_OPTIMIZER = re.compile(rf"^(?:{_OPTIMIZERS})(?:_\d+)?(?:/|$)", re.IGNORECASE)


def phase_of(name: str) -> int:
    """The number of the phase in a path of TensorFlow or JAX; −1 if the name does not tell."""
    path = _WRAPPERS.sub("", name)
    if _BACKWARD.search(path):
        return BACKWARD
    if _OPTIMIZER.match(path):
        return OPTIMIZER
    return FORWARD if "jvp(" in path else -1


def phases_by_name(names: pa.DictionaryArray) -> pa.DictionaryArray:
    """The phase of each event. We look at each name once, however many events carry it."""
    words: Sequence[str] = names.dictionary.to_pylist()
    by_code = np.array([phase_of(word) for word in words], dtype=np.int32)
    return words_column(by_code[names.indices.to_numpy()], PHASES)


_NEEDED = ("name", "device", "start_ns", "duration_ns")
_OPTIONAL = ("phase", "lane", "step")
_WORDS = ("name", "device", "phase")


def read(content: pa.Buffer, kind: str, where: str) -> pa.Table:
    table = read_table(content, kind, (*_NEEDED, *_OPTIONAL), _WORDS, where)
    if kind == "csv":
        table = _typed(table)
    return _events(table, where)


def events_table(data: Any, where: str = "events") -> pa.Table:
    """Events from a dict of arrays, an Arrow table or a data frame, as a table of schema EVENTS.

    int64 columns are passed on without a copy. Lanes may be words: each gets a number.
    """
    return _events(as_table(data, where), where)


def _events(table: pa.Table, where: str) -> pa.Table:
    need_columns(table, _NEEDED, _OPTIONAL, where)
    columns = {
        "name": text(table, "name", where),
        "device": text(table, "device", where),
        "start_ns": whole(table, "start_ns", where),
        "duration_ns": whole(table, "duration_ns", where),
    }
    for name in _OPTIONAL:
        kind = EVENTS.field(name).type
        if name not in table.column_names:
            columns[name] = constant(None, kind, table.num_rows)
        elif name == "lane":
            columns[name] = _lane(table, where)
        else:
            columns[name] = (text if kind == TEXT else whole)(table, name, where, nullable=True)
    check_times(columns["start_ns"], columns["duration_ns"], where)
    return pa.table([columns[name] for name in EVENTS.names], schema=EVENTS)


def check_times(start_ns: pa.ChunkedArray, duration_ns: pa.ChunkedArray, where: str) -> None:
    start, duration = start_ns.to_numpy(), duration_ns.to_numpy()
    if int(duration.min()) < 0:
        refuse(where, "duration_ns", duration < 0, "is negative")
    if int(start.max()) > MOST_NS - int(duration.max()):
        refuse(where, "start_ns + duration_ns", start > MOST_NS - duration, "is beyond 64 bits")
    # Far from the ends of 64 bits: differences of times must fit too.
    if max(int(start.max()), -int(start.min())) > MOST_T_NS:
        refuse(where, "start_ns", np.abs(start) > MOST_T_NS, "is no time in nanoseconds since 1970")


def _typed(table: pa.Table) -> pa.Table:
    """In a CSV all is text: an empty field is null, and a lane of digits is a number."""
    for name in set(_OPTIONAL) & set(table.column_names):
        column = table[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(pa.string())
        column = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
        if name == "lane":
            with contextlib.suppress(pa.ArrowInvalid):
                column = column.cast(pa.int64())
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _lane(table: pa.Table, where: str) -> pa.ChunkedArray:
    kind = table["lane"].type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_null(value):
        return whole(table, "lane", where, nullable=True)
    if "string" not in str(value):
        raise UserError(f"{where}: lane is of type {kind}", remedy="Lanes are whole numbers or words")
    words = text(table, "lane", where, nullable=True)
    return pa.chunked_array([chunk.indices.cast(pa.int64()) for chunk in words.chunks], pa.int64())


def built(
    names: pa.Array,
    devices: pa.Array,
    start_ns: np.ndarray[Any, np.dtype[np.int64]],
    duration_ns: np.ndarray[Any, np.dtype[np.int64]],
    phases: pa.Array | None = None,
    lanes: pa.Array | None = None,
    steps: pa.Array | None = None,
    calls: pa.Array | None = None,
) -> pa.Table:
    """A table of schema EVENTS from columns that a reader has checked already."""
    rows = start_ns.size
    table = pa.table(
        [
            names,
            devices,
            pa.array(start_ns),
            pa.array(duration_ns),
            constant(None, TEXT, rows) if phases is None else phases,
            constant(None, pa.int64(), rows) if lanes is None else lanes,
            constant(None, pa.int64(), rows) if steps is None else steps,
        ],
        schema=EVENTS,
    )
    return table if calls is None else table.append_column("call", calls)
