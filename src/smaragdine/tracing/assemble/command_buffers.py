"""Which instruction a kernel of a command buffer (a CUDA graph) executes.

XLA gives the buffer's name for every kernel in it, and a kernel's own name is no help: one kernel serves all
instructions that are alike, those of all layers, and is called after one of them. But the nodes of a graph
are numbered as they were made, one for each instruction in the order of the schedule. A call of a library (a
product) is a graph within the graph: its own number stays free, and its kernels have theirs behind all
others, again in order.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from smaragdine.tracing.assemble.hlo import Program
from smaragdine.tracing.assemble.xplane_rows import Row, Rows

COMMAND_BUFFER = "command_buffer"
# What a library launches beside its product: zeros to begin with, and at last the sum of its pieces.
_BEFORE = re.compile(r"Mem(?:set|cpy)", re.IGNORECASE)
_AFTER = re.compile(r"splitk\w*reduce|reduce\w*splitk", re.IGNORECASE)


def out_of_buffers(events: Rows, programs: Mapping[int, Program]) -> Rows:
    """The same events; those of command buffers with their instructions, as far as these could be found."""
    owners: dict[int, tuple[int, str]] = {}
    for row in events.rows:
        if row.graph is not None and row.program is not None and row.operation.startswith(COMMAND_BUFFER):
            owners[row.graph] = row.program, row.module
    owners = {graph: owner for graph, owner in owners.items() if owner[0] in programs}
    # All launches of a graph together: the first and the last may be cut.
    nodes: dict[int, dict[int, Row]] = {}
    for row in events.rows:
        if row.graph is not None and row.graph in owners and row.node is not None:
            nodes.setdefault(row.graph, {})[row.node] = row
    found = {graph: _instructions(nodes[graph], programs[owners[graph][0]]) for graph in nodes}
    rows = list(events.rows)
    for number, row in enumerate(rows):
        if row.graph is not None and row.graph in owners:
            # What was launched before the profiler ran does not say its program.
            program, module = owners[row.graph]
            operation = found.get(row.graph, {}).get(row.node or 0, COMMAND_BUFFER)
            rows[number] = replace(row, operation=operation, program=program, module=module)
    return replace(events, rows=rows)


def _instructions(nodes: Mapping[int, Row], program: Program) -> dict[int, str]:
    """Node of a graph → its instruction."""
    place = {each.name: at for at, each in enumerate(program.order)}
    own = {
        node: place[name]
        for node, row in nodes.items()
        if (name := program.kernels.get(row.text)) is not None and name in place
    }
    if not own:
        return {}
    # The instruction that a kernel is called after is one of those it serves.
    shift = Counter(at - node for node, at in own.items()).most_common(1)[0][0]
    last = max(own)
    found = {
        node: program.order[node + shift].name
        for node in nodes
        if node <= last and 0 <= node + shift < len(program.order)
    }
    taken = {node + shift for node in found}
    libraries = [at for at, each in enumerate(program.order) if each.is_library and at not in taken]
    inside = libraries[bisect_left(libraries, min(taken)) : bisect_left(libraries, max(taken))]
    calls = _calls([(node, nodes[node]) for node in sorted(nodes) if node > last])
    for candidates in (inside, _with_edges(inside, libraries, min(taken), max(taken))):
        if len(candidates) == len(calls):
            for call, at in zip(calls, candidates, strict=True):
                found.update(dict.fromkeys(call, program.order[at].name))
            break
    return found


def _with_edges(inside: list[int], libraries: list[int], first: int, last: int) -> list[int]:
    """And the library calls right before the first other instruction, and right behind the last."""
    known = set(libraries)
    while first - 1 in known:
        first -= 1
        inside = [first, *inside]
    while last + 1 in known:
        last += 1
        inside = [*inside, last]
    return inside


def _calls(nodes: Sequence[tuple[int, Row]]) -> list[list[int]]:
    """Nodes of one library call together: it has one product."""
    calls: list[list[int]] = []
    before: list[int] = []
    for node, row in nodes:
        if _BEFORE.match(row.text):
            before.append(node)
        elif calls and _AFTER.search(row.text):
            calls[-1].append(node)
        else:
            calls.append([*before, node])
            before = []
    return calls
