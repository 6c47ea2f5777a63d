"""Train a small BERT on generated sentences for about a minute, with whichever backend Keras is told to use.

    KERAS_BACKEND=jax smaragdine run examples/bert.py

Nothing here knows of Smaragdine: it finds epochs and steps by itself.
"""

import argparse
import math
import os
import time

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers

VOCABULARY, LENGTH, MASK = 2000, 64, 1


def transformer(x, index, width, heads):
    name = f"layer_{index}"
    attended = layers.MultiHeadAttention(heads, width // heads, name=f"{name}_attention")(x, x)
    x = layers.LayerNormalization(name=f"{name}_attention_norm")(x + attended)
    wide = layers.Dense(4 * width, activation="gelu", name=f"{name}_intermediate")(x)
    out = layers.Dense(width, name=f"{name}_output")(wide)
    return layers.LayerNormalization(name=f"{name}_output_norm")(x + out)


class PositionEmbeddings(layers.Layer):
    """Adds a learned vector per position."""

    def build(self, shape):
        self.table = self.add_weight(name="table", shape=shape[1:], initializer="random_normal")

    def call(self, x):
        return x + self.table


def bert(depth, width, heads):
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    x = layers.Embedding(VOCABULARY, width, name="word_embeddings")(tokens)
    x = PositionEmbeddings(name="position_embeddings")(x)
    x = layers.LayerNormalization(name="embeddings_norm")(x)
    for index in range(depth):
        x = transformer(x, index, width, heads)
    return keras.Model(tokens, layers.Dense(VOCABULARY, name="masked_words")(x), name="bert")


def sentences(count, seed=0):
    """Runs of neighbouring words with a seventh of them masked, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    start = rng.integers(2, VOCABULARY, size=(count, 1))
    words = 2 + (start + np.arange(LENGTH) * rng.integers(1, 4, size=(count, 1))) % (VOCABULARY - 2)
    masked = rng.random(words.shape) < 0.15
    return np.where(masked, MASK, words).astype("int32"), words.astype("int32"), masked.astype("float32")


def main():
    parser = argparse.ArgumentParser(description="Train a small BERT on generated sentences.")
    parser.add_argument("--seconds", type=float, default=50, help="roughly how long to train")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args()

    model = bert(options.layers, options.hidden, heads=max(1, options.hidden // 64))
    model.compile(
        optimizer=keras.optimizers.Adam(3e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    print(
        f"BERT, {options.layers} layers of {options.hidden}, {model.count_params():,} parameters, "
        f"on {keras.backend.backend()}"
    )
    x, y, weight = (array[: options.batch_size] for array in sentences(options.batch_size))
    model.train_on_batch(x, y, sample_weight=weight)  # compiles
    begin = time.perf_counter()
    for _ in range(3):
        model.train_on_batch(x, y, sample_weight=weight)
    step_s = (time.perf_counter() - begin) / 3
    steps = max(2, math.ceil(options.seconds / options.epochs / step_s))
    print(f"{options.epochs} epochs of {steps} steps, {step_s * 1e3:.0f} ms a step")
    x, y, weight = sentences(steps * options.batch_size)
    model.fit(x, y, sample_weight=weight, batch_size=options.batch_size, epochs=options.epochs, verbose=2)


if __name__ == "__main__":
    main()
