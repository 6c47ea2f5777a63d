"""MNIST with two dense layers, as in the GPyJoules report: 2 × 512 and batch 128, or 2 × 16384 and batch 32.

    smaragdine run experiments/gpyjoules/mnist.py --width 512 --batch 128 --epochs 10

The digits come from --data FILE (mnist.npz) or from Keras' own cache; --download fetches them. Otherwise
they are generated, in the same shape.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if "KERAS_BACKEND" not in os.environ:
    os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers

TRAINING, PIXELS, DIGITS = 60_000, 784, 10


def digits(options):
    """Pixels from 0 to 1, labels, and where they come from."""
    cached = Path.home() / ".keras" / "datasets" / "mnist.npz"
    path = Path(options.data) if options.data else cached
    if options.download and not options.data:
        keras.datasets.mnist.load_data()
    if options.data or path.exists():
        with np.load(path) as found:
            pixels, labels = found["x_train"], found["y_train"]
        return pixels.reshape(-1, PIXELS).astype("float32") / 255, labels.astype("int32"), str(path)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, DIGITS, TRAINING).astype("int32")
    pixels = rng.random((DIGITS, PIXELS), dtype="float32")[labels]
    pixels += rng.normal(0, 0.3, pixels.shape).astype("float32")
    return np.clip(pixels, 0, 1), labels, "made up"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, help="steps in an epoch (default: all digits once)")
    parser.add_argument("--data", help="mnist.npz")
    parser.add_argument("--download", action="store_true")
    options = parser.parse_args()
    pixels, labels, source = digits(options)
    if options.steps:
        pixels, labels = pixels[: options.steps * options.batch], labels[: options.steps * options.batch]
    print(f"digits: {len(pixels)}, {source}", flush=True)
    model = keras.Sequential(
        [
            keras.Input((PIXELS,)),
            layers.Dense(options.width, activation="relu", name="hidden_0"),
            layers.Dropout(0.2),
            layers.Dense(options.width, activation="relu", name="hidden_1"),
            layers.Dropout(0.2),
            layers.Dense(DIGITS, name="digits"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.RMSprop(), loss, metrics=["accuracy"])
    model.fit(pixels, labels, batch_size=options.batch, epochs=options.epochs, verbose=2)


if __name__ == "__main__":
    main()
