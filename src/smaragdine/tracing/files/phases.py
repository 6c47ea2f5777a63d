"""The phase of an operation, where its name alone makes it evident."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from smaragdine.recording.columns import words_column

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
    """The number of a phase, −1 where the name does not say. Paths of TensorFlow and JAX."""
    path = _WRAPPERS.sub("", name)
    if _BACKWARD.search(path):
        return BACKWARD
    if _OPTIMIZER.match(path):
        return OPTIMIZER
    return FORWARD if "jvp(" in path else -1


def phases_by_name(names: pa.DictionaryArray) -> pa.DictionaryArray:
    """Each name is looked at once, however many events carry it."""
    words: Sequence[str] = names.dictionary.to_pylist()
    by_code = np.array([phase_of(word) for word in words], dtype=np.int32)
    return words_column(by_code[names.indices.to_numpy()], PHASES)
