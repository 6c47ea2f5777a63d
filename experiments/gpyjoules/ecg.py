"""A residual network on 1-D signals, as in Hannun et al. 2019 and the GPyJoules report: 33 convolutions.

    smaragdine run experiments/gpyjoules/ecg.py --epochs 10

The signals come from --data FOLDER (the training folder of the PhysioNet challenge 2017: A00001.mat … and
REFERENCE.csv; needs scipy). Otherwise they are generated, in the same shape: 30 s at 300 Hz, four rhythms.
"""

import argparse
import csv
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if "KERAS_BACKEND" not in os.environ:
    os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers

LENGTH, STEP, RHYTHMS = 8960, 256, "NAO~"  # a rhythm is said for every STEP samples
BLOCKS, FILTERS, KERNEL = 16, 32, 16


def network(blocks):
    signal = keras.Input((LENGTH, 1))
    x = _normal(layers.Conv1D(FILTERS, KERNEL, padding="same", name="first")(signal), "first")
    for block in range(blocks):
        x = _residual(x, block)
    x = _normal(x, "last")
    # What the blocks have not halved: 35 rhythms for 8960 samples.
    pool = x.shape[1] // (LENGTH // STEP)
    x = layers.AveragePooling1D(pool, name="pool")(x) if pool > 1 else x
    return keras.Model(signal, layers.Dense(len(RHYTHMS), name="rhythms")(x), name="ecg")


def _residual(x, block):
    """Every second block halves the signal, every fourth doubles the filters."""
    stride, filters = 1 + block % 2, FILTERS * 2 ** (block // 4)
    short = layers.MaxPooling1D(stride, name=f"block_{block}_short")(x) if stride > 1 else x
    if short.shape[-1] != filters:
        short = layers.Conv1D(filters, 1, name=f"block_{block}_widen")(short)
    if block:
        x = _normal(x, f"block_{block}_0")
    x = layers.Conv1D(filters, KERNEL, strides=stride, padding="same", name=f"block_{block}_conv_0")(x)
    x = layers.Dropout(0.2)(_normal(x, f"block_{block}_1"))
    x = layers.Conv1D(filters, KERNEL, padding="same", name=f"block_{block}_conv_1")(x)
    return layers.Add(name=f"block_{block}")([x, short])


def _normal(x, name):
    return layers.ReLU(name=f"{name}_relu")(layers.BatchNormalization(name=f"{name}_norm")(x))


def signals(folder, count):
    """Signals of unit variance, a rhythm for every step, and where they come from."""
    if folder:
        return (*_recorded(Path(folder), count), folder)
    rng = np.random.default_rng(0)
    rhythm = rng.integers(0, len(RHYTHMS), count)
    t = np.arange(LENGTH) / 300
    beats = np.sin(2 * np.pi * (1 + rhythm[:, None] / 4) * t + rng.random((count, 1)))
    wave = beats**15 + rng.normal(0, 0.1, (count, LENGTH))
    return wave[..., None].astype("float32"), _everywhere(rhythm), "made up"


def _recorded(folder, count):
    from scipy.io import loadmat

    with open(folder / "REFERENCE.csv", newline="") as file:
        known = [(name, label) for name, label in csv.reader(file) if label in RHYTHMS][:count]
    waves = np.zeros((len(known), LENGTH, 1), dtype="float32")
    for n, (name, _) in enumerate(known):
        wave = loadmat(folder / f"{name}.mat")["val"][0, :LENGTH].astype("float32")
        waves[n, : len(wave), 0] = (wave - wave.mean()) / (wave.std() or 1)
    return waves, _everywhere(np.array([RHYTHMS.index(label) for _, label in known]))


def _everywhere(rhythm):
    return np.repeat(rhythm[:, None], LENGTH // STEP, axis=1).astype("int32")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, help="steps in an epoch (default: 8528 signals once)")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="fewer for a quick try")
    parser.add_argument("--data", help="the challenge's training folder")
    options = parser.parse_args()
    waves, rhythms, source = signals(options.data, (options.steps or 8528 // options.batch) * options.batch)
    print(f"signals: {len(waves)}, {source}", flush=True)
    model = network(options.blocks)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    model.fit(waves, rhythms, batch_size=options.batch, epochs=options.epochs, verbose=2)


if __name__ == "__main__":
    main()
