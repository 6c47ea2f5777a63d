"""Calls of code that inductor generated → the modules they come from.

The source of a generated function says for each call which nodes of the program's graph are behind it, and
those know their module. A fused kernel goes by what its nodes share. In a backward function only some nodes
are the program's: a product is known by the weights it reads, or by a gradient it shares with one that does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_SOURCES = re.compile(r"# (?:Topologically Sorted )?Source Nodes: \[([^\]]*)\]")
_EXTERN = re.compile(r"(?:extern_kernels\.|torch\.ops\.aten\.)(\w+)(?:\.\w+)?\((.*)")
_FUSED = re.compile(r"(\w+)\.run\((.*)")
_WORD = re.compile(r"[A-Za-z_]\w*")
_OUTPUT = re.compile(r"\bout=\w+")
# In a backward function these are as a rule steps of a derivative, not the program's nodes of the same name.
_PRIMITIVE = re.compile(
    r"(?:add|sub|mul|div|neg|exp|log|pow|sqrt|rsqrt|reciprocal|sum|mean|view|reshape|permute|transpose|t|"
    r"unsqueeze|squeeze|expand|slice|select|clone|copy|full|where|cat|mm|bmm|addmm|convert_element_type|maximum|minimum|clamp|sigmoid|tanh|erf)(?:_\d+)?$"
)


class _Call(NamedTuple):
    name: str  # as the profiler records it
    fused: bool
    sources: tuple[str, ...]
    operands: frozenset[str]


@dataclass(frozen=True)
class Compiled:
    """What the hook found in the program: source lines per graph, module per node per compiled region."""

    graphs: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    regions: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    models: tuple[str, ...] = ()  # classes of the modules given to torch.compile
    _weights: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])

    def root(self, region: str) -> str:
        """The model that was compiled, where the region's nodes say so; "" where they do not."""
        paths = list(self.regions.get(region, {}).values())
        if paths and all(path.startswith("/") for path in paths):
            return shared(paths)[1:]
        return self.models[0] if len(self.models) == 1 else ""

    def calls(self, graph: str, region: str, backward: bool) -> list[tuple[str, str | None]]:
        """(name, path below the region's module) of each call, in order. Forward functions come first."""
        nodes = self.regions.get(region, {})
        calls = _parsed(self.graphs.get(graph, ()))
        if not backward:
            weights = self._weights.setdefault(region, {})
            paths = [_forward(call, nodes) for call in calls]
            for call, path in zip(calls, paths, strict=True):
                if path is not None and not call.fused:
                    for word in call.operands:
                        if word.startswith("primals_"):
                            weights[word] = path if word not in weights else shared([weights[word], path])
        else:
            paths = _backward(calls, nodes, self._weights.get(region, {}))
        return [(call.name, path) for call, path in zip(calls, paths, strict=True)]


def compiled_of(meta: dict[str, Any]) -> Compiled:
    facts = meta.get("compiled") or {}
    return Compiled(
        dict(facts.get("graphs", {})), dict(facts.get("regions", {})), tuple(facts.get("models", ()))
    )


class CallFollower:
    """The calls of one execution of a generated function, matched as they come."""

    def __init__(self, calls: Sequence[tuple[str, str | None]]) -> None:
        self._calls = calls
        self._next = 0

    def path_of(self, name: str) -> str | None:
        # What the generated code does without a word (C++ loops on a CPU) is skipped.
        for at in range(self._next, len(self._calls)):
            if self._calls[at][0] == name:
                self._next = at + 1
                return self._calls[at][1]
        return None


def shared(paths: Iterable[str]) -> str:
    """The part that all paths begin with."""
    first, *others = (path.split("/") for path in paths)
    size = len(first)
    for parts in others:
        while first[:size] != parts[:size]:
            size -= 1
    return "/".join(first[:size])


def _parsed(lines: Sequence[str]) -> list[_Call]:
    calls: list[_Call] = []
    sources: tuple[str, ...] = ()
    for line in lines:
        comment = _SOURCES.match(line)
        if comment is not None:
            sources = tuple(word.strip() for word in comment[1].split(",") if word.strip())
            continue
        found = _EXTERN.search(line) or _FUSED.search(line)
        if found is not None:
            fused = found.re is _FUSED
            operands = frozenset(_WORD.findall(_OUTPUT.sub("", found[2]))) - {"reinterpret_tensor"}
            calls.append(_Call(found[1] if fused else f"aten::{found[1]}", fused, sources, operands))
            sources = ()
    return calls


def _forward(call: _Call, nodes: dict[str, str]) -> str | None:
    known = [nodes[node] for node in call.sources if node in nodes]
    if not known:
        return None
    # Of a library's call the last node is the operation itself; those before it only shape its operands.
    return shared(known) if call.fused else known[-1]


def _backward(calls: Sequence[_Call], nodes: dict[str, str], weights: dict[str, str]) -> list[str | None]:
    paths: list[str | None] = []
    by_gradient: dict[str, set[str]] = {}
    for call in calls:
        read = [] if call.fused else [weights[word] for word in call.operands if word in weights]
        paths.append(shared(read) if read else None)
        if read:
            for word in call.operands - weights.keys():
                by_gradient.setdefault(word, set()).add(shared(read))
    for at, call in enumerate(calls):
        if paths[at] is None and not call.fused:
            near = [path for word in call.operands for path in by_gradient.get(word, ())]
            paths[at] = shared(near) if near else None
        if paths[at] is None:
            known = [nodes[node] for node in call.sources if node in nodes and not _PRIMITIVE.match(node)]
            paths[at] = shared(known) if known else None
    return paths
