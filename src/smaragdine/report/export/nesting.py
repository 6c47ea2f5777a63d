"""Slices on tracks: what is drawn must nest, so what merely overlaps goes to another track of its lane."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

Lane = TypeVar("Lane", bound=Hashable)


class Slice(NamedTuple, Generic[Lane]):
    start_ns: int
    end_ns: int
    lane: Lane
    nests: bool  # it may be drawn inside another one of its lane
    item: int  # what it shows, to whoever draws it


class Edge(NamedTuple, Generic[Lane]):
    """A slice begins, or (`slice` None) the last one begun on a track ends."""

    t_ns: int
    track: tuple[Lane, int]  # the lane, and which of its tracks
    slice: Slice[Lane] | None


def edges(slices: Iterable[Slice[Lane]]) -> Iterator[Edge[Lane]]:
    """Beginnings and ends in the order of time, of slices by start and, of equal starts, the longest first.

    On each track ends come before the beginnings of the same instant.
    """
    ends: list[tuple[int, int, tuple[Lane, int]]] = []
    stacks: dict[Lane, list[list[int]]] = {}  # lane → per track, the ends of what is open
    for number, one in enumerate(slices):
        yield from _ended(ends, stacks, one.start_ns)
        tracks = stacks.setdefault(one.lane, [])
        at = next((i for i, stack in enumerate(tracks) if _fits(stack, one)), len(tracks))
        if at == len(tracks):
            tracks.append([])
        tracks[at].append(one.end_ns)
        # The number is there because lanes cannot be compared.
        heapq.heappush(ends, (one.end_ns, number, (one.lane, at)))
        yield Edge(one.start_ns, (one.lane, at), one)
    yield from _ended(ends, stacks, None)


def _fits(stack: list[int], one: Slice[Lane]) -> bool:
    return not stack or (one.nests and one.end_ns <= stack[-1])


def _ended(
    ends: list[tuple[int, int, tuple[Lane, int]]], stacks: dict[Lane, list[list[int]]], until_ns: int | None
) -> Iterator[Edge[Lane]]:
    while ends and (until_ns is None or ends[0][0] <= until_ns):
        end_ns, _, (lane, at) = heapq.heappop(ends)
        stacks[lane][at].pop()
        yield Edge(end_ns, (lane, at), None)
