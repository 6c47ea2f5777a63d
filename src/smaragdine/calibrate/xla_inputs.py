"""Made-up inputs for programs of XLA, on the card: standard library and NumPy alone, Python 3.8."""

import collections
import itertools

KEPT_BYTES = 4 << 30  # of inputs for whoever reads the like


class CannotBeMade(Exception):
    """Why, in words for a person."""


# xla.PrimitiveType → NumPy's or ml_dtypes' name, and PJRT's number where it is another.
TYPES = {
    1: ("bool", 1),
    2: ("int8", 2),
    3: ("int16", 3),
    4: ("int32", 4),
    5: ("int64", 5),
    6: ("uint8", 6),
    7: ("uint16", 7),
    8: ("uint32", 8),
    9: ("uint64", 9),
    10: ("float16", 10),
    11: ("float32", 11),
    12: ("float64", 12),
    15: ("complex64", 14),
    16: ("bfloat16", 13),
    18: ("complex128", 15),
    19: ("float8_e5m2", 16),
    20: ("float8_e4m3fn", 17),
}
UNSIGNED = (6, 7, 8, 9)  # random bits: keys and states of generators
SIGNED = (2, 3, 4, 5)


class Values:
    """Random normal numbers, nine true of ten, indices in range; of what is large, the same over and over."""

    def __init__(self):
        import ml_dtypes
        import numpy

        self.numpy, self.ml_dtypes = numpy, ml_dtypes
        self.random = numpy.random.default_rng(0)
        self.normal = self.random.standard_normal((1 << 20) + 7).astype("float32")

    def dtype(self, kind):
        if kind not in TYPES:
            raise CannotBeMade("values of its type are not made here (%d)" % kind)
        name = TYPES[kind][0]
        return self.numpy.dtype(getattr(self.ml_dtypes, name, None) or name)

    def count_and_bytes(self, shape):
        count = 1
        for length in shape.dims:
            count *= length
        return count, count * self.dtype(shape.kind).itemsize

    def of(self, shape, below):
        dtype, (count, _) = self.dtype(shape.kind), self.count_and_bytes(shape)
        if shape.kind == 1:
            flat = self.normal > -1.28
        elif shape.kind in UNSIGNED:
            flat = self.random.integers(0, 1 << 8 * dtype.itemsize, 1 << 16, dtype)
        elif shape.kind in SIGNED:
            most = min(below, 1 << 8 * dtype.itemsize - 1)
            flat = self.random.integers(0, max(most, 1), min(count, 1 << 20) or 1).astype(dtype)
        else:
            flat = self.normal.astype(dtype)
        return self.numpy.resize(flat, count)


class Pool:
    """Inputs on the card. Calls resemble each other: what one has read, the next may read."""

    def __init__(self, plugin, values):
        self.plugin, self.values = plugin, values
        self.kept = collections.defaultdict(list)
        self.kept_bytes = 0

    def take(self, shape, below):
        kept = self.kept[self._key(shape, below)]
        if kept:
            self.kept_bytes -= self.values.count_and_bytes(shape)[1]
            return kept.pop()
        try:
            return self._made(shape, below)
        except Exception:  # most likely there is no memory left
            self.empty()
        return self._made(shape, below)

    def give(self, shape, below, buffer):
        size = self.values.count_and_bytes(shape)[1]
        if self.kept_bytes + size > KEPT_BYTES:
            self.plugin.free(buffer)
            return
        self.kept_bytes += size
        self.kept[self._key(shape, below)].append(buffer)

    def empty(self):
        for each in itertools.chain.from_iterable(self.kept.values()):
            self.plugin.free(each)
        self.kept.clear()
        self.kept_bytes = 0

    def _key(self, shape, below):
        return shape.raw, below if shape.kind in SIGNED else 0

    def _made(self, shape, below):
        values = self.values.of(shape, below)
        kind, item_bytes = TYPES[shape.kind][1], values.dtype.itemsize
        return self.plugin.buffer(values.ctypes.data, kind, shape.dims, shape.minor_to_major, item_bytes)
