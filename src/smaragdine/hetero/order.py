"""Which samples a rank gets of every global batch. Every rank computes the same, and nobody has to ask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Part:
    """A rank's part of one global batch."""

    samples: int  # of this rank
    global_samples: int


def shares(total: int, batches: Sequence[int]) -> list[int]:
    """`total` samples in proportion to `batches`, by largest remainder; the lower rank first in a tie."""
    whole = sum(batches)
    found = [total * batch // whole for batch in batches]
    by_remainder = sorted(range(len(batches)), key=lambda rank: (-(total * batches[rank] % whole), rank))
    for rank in by_remainder[: total - sum(found)]:
        found[rank] += 1
    return found


def permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of an epoch. numpy promises this generator's numbers for all its versions: unequal machines
    need not have equal ones."""
    return np.random.RandomState([seed, epoch]).permutation(count)


class ShardSampler:
    """The batches of one rank, as a DataLoader's `batch_sampler`."""

    def __init__(
        self, count: int, batches: Sequence[int], rank: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self._count = count
        self._batches = tuple(batches)
        self._rank = rank
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self.epoch = 0

    def __len__(self) -> int:
        whole = sum(self._batches)
        return self._count // whole if self._drop_last else -(-self._count // whole)

    def parts(self) -> Iterator[Part]:
        """What `__iter__` gives, as counts."""
        for begin in self._begins():
            total = min(sum(self._batches), self._count - begin)
            yield Part(shares(total, self._batches)[self._rank], total)

    def __iter__(self) -> Iterator[list[int]]:
        order = permutation(self._count, self._seed, self.epoch) if self._shuffle else np.arange(self._count)
        for begin in self._begins():
            indices = order[begin : begin + sum(self._batches)]
            counts = shares(len(indices), self._batches)
            first = sum(counts[: self._rank])
            mine = indices[first : first + counts[self._rank]]
            # A rank without samples must still take part in the all-reduce: a sample stands in, and has no
            # weight.
            yield (mine if mine.size else indices[:1]).tolist()

    def _begins(self) -> range:
        whole = sum(self._batches)
        return range(0, len(self) * whole, whole)
