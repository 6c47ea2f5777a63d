"""What a card draws over a call that nobody can replay, learned from those that were replayed on it.

Calls alike draw alike: those of one class (products, reductions, …), of one kernel, of one operation, of
about the same length and number of blocks. So a call is taken to draw what those near it do, the nearer the
more (a Gaussian process), and where none is near, what the others do. A kernel of a few blocks leaves most of
the card idle, and draws so much less.

How far off that is we try out: the calls of one program are left out and guessed from those of the others.
Its bars are as wide as these errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from smaragdine.arrays import Floats
from smaragdine.calibrate.store import MeasuredCall

LEAST = 12  # calls: fewer teach nothing
MOST = 1000  # of the latest; the work grows with the third power
_FOLDS = 10

_CLASSES = (
    ("product", r"gemm|nvjet|cutlass|triton_tem|wgmma|xmma|conv|mm\b"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("norm", r"norm|softmax|triton_(?:per|red)_"),
    ("reduction", r"reduce|sum|mean|scan|sort|loss"),
    ("index", r"embedding|gather|scatter|index|\bcat|CatArray"),
    ("copy", r"copy|memcpy|memset|fill"),
)
# How much alike two calls are: variances of what they share, and over how many doublings it fades.
_ALL, _CLASS, _CLASS_NEAR, _KERNEL_NEAR, _OP_NEAR = 0.5, 0.5, 0.5, 0.3, 0.3
_NOISE = 0.02
_TIME_FADES, _BLOCKS_FADE = 2.0, 4.0
_FULL = 100  # blocks: about as many as a card has multiprocessors
_LEAST_FILL = 0.1  # below it, bars shrink no further
_WIDER = (1.0, 5.0)  # what the trial may do to the bars: a program of another kind is further off


@dataclass(frozen=True)
class CallSketch:
    """What is known of a call before anybody replays it."""

    op: str
    kernel: str
    blocks: int
    time_s: float

    @property
    def of_class(self) -> str:
        text = f"{self.op} {self.kernel}"
        found = (name for name, words in _CLASSES if re.search(words, text, re.IGNORECASE))
        return next(found, "elementwise")

    @property
    def function(self) -> str:
        """The kernel without types and sizes."""
        return re.sub(r"\d+", "", re.split(r"[<(]", self.kernel.removeprefix("void "), maxsplit=1)[0])


@dataclass(frozen=True)
class Guess:
    above_w: float  # above the idle card
    deviation: float  # of that, as a part of it


@dataclass(frozen=True)
class CardModel:
    sketches: Sequence[CallSketch]
    above_w: Floats
    wider: float  # what bars are multiplied with, as the trial says
    error: float  # of the trial: what the guesses are off, as a part of what was measured
    programs: int  # left out one by one; if there is one, each of its operations was

    @property
    def remark(self) -> str:
        tried = "one program after the other" if self.programs > 1 else "one operation after the other"
        return (
            f"what was not replayed goes by a model of the card, learned from {len(self.sketches)} calls; "
            f"with {tried} left out, it is {self.error:.0%} off"
        )

    def guesses(self, asked: Sequence[CallSketch]) -> list[Guess]:
        if not asked:
            return []
        above_w, off_w = _guessed(self.sketches, self.above_w, asked)
        pairs = zip(above_w.tolist(), off_w.tolist(), strict=True)
        return [Guess(watts, min(self.wider * off / max(watts, 1.0), 100.0)) for watts, off in pairs]


def learned(replays: Iterable[MeasuredCall]) -> CardModel | None:
    """None where too little is known."""
    usable = [each for each in replays if (each.cold or each.hot) and each.kernel][-MOST:]
    if len(usable) < LEAST:
        return None
    sketches: list[CallSketch] = []
    above: list[float] = []
    for each in usable:
        state = each.cold or each.hot
        assert state is not None
        sketches.append(CallSketch(each.op, each.kernel, each.blocks, state.time_s))
        above.append(max(state.power_w - each.idle_w, 0.0))
    above_w = np.array(above)
    programs = len({each.program for each in usable})
    groups = [each.program if programs > 1 else each.op for each in usable]
    names = list(dict.fromkeys(groups))
    fold = np.array([names.index(group) % _FOLDS for group in groups])
    off_w, width_w = np.zeros(above_w.size), np.ones(above_w.size)
    for left_out in np.unique(fold):
        inside, outside = np.flatnonzero(fold != left_out), np.flatnonzero(fold == left_out)
        if not inside.size:
            return None
        guessed_w, width_w[outside] = _guessed(
            [sketches[i] for i in inside], above_w[inside], [sketches[i] for i in outside]
        )
        off_w[outside] = guessed_w - above_w[outside]
    wider = float(np.clip(math.sqrt(np.mean((off_w / width_w) ** 2)), *_WIDER))
    error = float(np.abs(off_w).sum() / max(above_w.sum(), 1.0))
    return CardModel(sketches, above_w, wider, error, programs)


def _guessed(
    known: Sequence[CallSketch], above_w: Floats, asked: Sequence[CallSketch]
) -> tuple[Floats, Floats]:
    """What the asked draw above idle, and one standard deviation of it."""
    fill_known, fill = _fill(known), _fill(asked)
    full_w = above_w / fill_known
    mean_w = float(np.average(full_w, weights=fill_known**2))
    scale_w = math.sqrt(float(np.average((full_w - mean_w) ** 2, weights=fill_known**2))) + 1.0
    among = _alike(known, known) + _NOISE * np.diag(1 / fill_known**2)
    towards = _alike(asked, known)
    solved = np.linalg.solve(among, np.column_stack([(full_w - mean_w) / scale_w, towards.T]))
    guessed_w = fill * (mean_w + scale_w * (towards @ solved[:, 0]))
    alone = _ALL + _CLASS + _CLASS_NEAR + _KERNEL_NEAR + _OP_NEAR + _NOISE
    variance = alone - np.einsum("ij,ji->i", towards, solved[:, 1:])
    off_w = scale_w * np.sqrt(np.maximum(variance, _NOISE)) * np.maximum(fill, _LEAST_FILL)
    return np.maximum(guessed_w, 0.0), off_w


def _fill(sketches: Sequence[CallSketch]) -> Floats:
    return np.array([min(max(each.blocks, 1) / _FULL, 1.0) for each in sketches])


def _alike(some: Sequence[CallSketch], others: Sequence[CallSketch]) -> Floats:
    near = np.exp(
        -(
            _apart(_times(some), _times(others), _TIME_FADES)
            + _apart(_blocks(some), _blocks(others), _BLOCKS_FADE)
        )
    )
    of_class = _same([each.of_class for each in some], [each.of_class for each in others])
    of_kernel = _same([each.function for each in some], [each.function for each in others])
    of_op = _same([each.op for each in some], [each.op for each in others])
    both = _CLASS_NEAR * of_class + _KERNEL_NEAR * of_kernel + _OP_NEAR * of_op
    return _CLASS * of_class + (_ALL + both) * near


def _same(some: Sequence[str], others: Sequence[str]) -> Floats:
    number: dict[str, int] = {}  # names are long, and every one meets every other
    one, other = (
        np.array([number.setdefault(name, len(number)) for name in names]) for names in (some, others)
    )
    return (one[:, None] == other[None]).astype(np.float64)


def _apart(some: Floats, others: Floats, fades: float) -> Floats:
    return ((some[:, None] - others[None]) / fades) ** 2 / 2


def _times(sketches: Sequence[CallSketch]) -> Floats:
    """In doublings of a microsecond; beyond a millisecond nothing changes any more."""
    return np.log2(np.clip([each.time_s * 1e6 for each in sketches], 1.0, 1e3))


def _blocks(sketches: Sequence[CallSketch]) -> Floats:
    return np.log2(np.clip([float(each.blocks) for each in sketches], 1.0, 32.0 * _FULL))
