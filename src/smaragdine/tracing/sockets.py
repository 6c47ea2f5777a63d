"""CPU events on the socket their thread ran on.

A profiler knows the thread of an event, not the CPU; the recording knows where the threads were. So CPU
events are all on `cpu:0` at first, with the thread's number as their lane, where the profiler tells it.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from smaragdine.arrays import Ints
from smaragdine.recording.tables import words_column

_HOST = "cpu:0"
_NO_THREAD = -1
_UNSEEN = -1


def on_sockets(events: pa.Table, places: pa.Table, pid: int) -> tuple[pa.Table, int]:
    """The events of one process, those of `cpu:0` on their sockets; and for how many that is a guess.

    An event is where its thread was last seen at or before its start, else where it was first seen after. A
    thread that was never seen (it was gone too soon, or the profiler does not tell which it was) is taken to
    be where most threads of the process were at that time. `places` is empty on machines of one socket.
    """
    tid, t_ns, socket = _of_process(places, pid)
    device = events["device"].unify_dictionaries().combine_chunks()
    words: list[str] = device.dictionary.to_pylist()
    if not places.num_rows or _HOST not in words:
        return events, 0
    codes = device.indices.to_numpy().copy()
    rows = np.flatnonzero(codes == words.index(_HOST))
    if not t_ns.size:
        return events, rows.size
    start_ns: Ints = events["start_ns"].to_numpy()[rows]
    lane: Ints = events["lane"].fill_null(_NO_THREAD).to_numpy()[rows]
    found = _last_seen(tid, t_ns, socket, lane, start_ns)
    unseen = found == _UNSEEN
    guessed = int(np.count_nonzero(unseen))
    if guessed:
        found[unseen] = _where_most(tid, t_ns, socket, start_ns[unseen])
    sockets, at = np.unique(found, return_inverse=True)
    codes[rows] = len(words) + at
    words += [f"cpu:{number}" for number in sockets]
    # Whoever lists a dictionary's words wants those in use.
    used, codes = np.unique(codes, return_inverse=True)
    column = words_column(codes.astype(np.int32), [words[code] for code in used])
    index = events.schema.get_field_index("device")
    return events.set_column(index, events.schema.field(index), column), guessed


def remarks_on(guessed: int) -> list[str]:
    """What is to be said once of all windows together."""
    if not guessed:
        return []
    return [
        f"on which socket {guessed:,} operations ran was not seen:"
        " they are taken to be where most threads of their process were"
    ]


def _of_process(places: pa.Table, pid: int) -> tuple[Ints, Ints, Ints]:
    """Thread, time and socket of the rows of one process, in order of time."""
    mine = np.flatnonzero(places["pid"].to_numpy() == pid)
    t_ns = places["t_ns"].to_numpy()[mine]
    order = np.argsort(t_ns, kind="stable")
    tid, socket = (places[name].to_numpy()[mine][order].astype(np.int64) for name in ("tid", "socket"))
    return tid, t_ns[order], socket


def _last_seen(tid: Ints, t_ns: Ints, socket: Ints, lane: Ints, start_ns: Ints) -> Ints:
    """The socket of each lane at each start; _UNSEEN where the lane is no thread that was seen."""
    tids, thread = np.unique(tid, return_inverse=True)
    times_ns, time = np.unique(t_ns, return_inverse=True)
    # Thread and time in one number that can be searched for; ranks of times, because times would overflow.
    stride = times_ns.size + 1
    key = thread * stride + time + 1
    order = np.argsort(key, kind="stable")
    key, socket = key[order], socket[order]
    wanted = np.minimum(np.searchsorted(tids, lane), tids.size - 1)
    rank = np.searchsorted(times_ns, start_ns, side="right")
    last = np.searchsorted(key, wanted * stride + rank, side="right") - 1
    first = np.searchsorted(key, np.arange(tids.size) * stride)
    return np.where(tids[wanted] == lane, socket[np.maximum(last, first[wanted])], _UNSEEN)


def _where_most(tid: Ints, t_ns: Ints, socket: Ints, start_ns: Ints) -> Ints:
    """The socket with the most threads at each start; of several the lowest. Rows are in order of time."""
    sockets, to = np.unique(socket, return_inverse=True)
    order = np.argsort(tid, kind="stable")
    again = np.flatnonzero(tid[order][1:] == tid[order][:-1])
    rows, before = order[again + 1], order[again]
    moved = np.zeros((t_ns.size, sockets.size), dtype=np.int64)
    moved[np.arange(t_ns.size), to] += 1
    moved[rows, to[before]] -= 1
    most = np.argmax(np.cumsum(moved, axis=0), axis=1)
    at = np.searchsorted(t_ns, np.maximum(start_ns, t_ns[0]), side="right") - 1
    return sockets[most[at]]
