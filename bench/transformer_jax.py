"""A transformer's training step in plain JAX, bf16, with dropout and an Adam of its own, for
docs/measurements/2026-11-19-h200-calibration.md.

    smaragdine run --calibrate --trace-skip 20 --trace-steps 20 python bench/transformer_jax.py 130
    python bench/transformer_jax.py STEPS [--layers 8] [--width 1024]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import smaragdine

HEADS, LENGTH, BATCH, WORDS = 16, 512, 16, 8192


def weights(key: Any, layers: int, width: int) -> Any:
    keys = iter(jax.random.split(key, 4 * layers + 2))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape, jnp.float32) * 0.02

    return {
        "words": normal(WORDS, width),
        "places": normal(LENGTH, width),
        "layers": [
            {
                "qkv": normal(width, 3 * width),
                "out": normal(width, width),
                "up": normal(width, 4 * width),
                "down": normal(4 * width, width),
                "norm_1": jnp.ones(width),
                "norm_2": jnp.ones(width),
                "bias_up": jnp.zeros(4 * width),
                "bias_down": jnp.zeros(width),
            }
            for _ in range(layers)
        ],
    }


def normalised(x: Any, scale: Any) -> Any:
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return ((x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale).astype(jnp.bfloat16)


def attention(x: Any, layer: Any) -> Any:
    def heads(t: Any) -> Any:
        return t.reshape(*t.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)

    query, key, value = map(heads, jnp.split(x @ layer["qkv"], 3, -1))
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    shares = jax.nn.softmax(scores, -1).astype(jnp.bfloat16)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", shares, value)
    return mixed.transpose(0, 2, 1, 3).reshape(x.shape) @ layer["out"]


def model(weights: Any, words: Any, key: Any) -> Any:
    x = (weights["words"][words] + weights["places"]).astype(jnp.bfloat16)
    for i, layer in enumerate(weights["layers"]):
        half = {name: each.astype(jnp.bfloat16) for name, each in layer.items()}
        with jax.named_scope(f"layer_{i}"):
            x = x + attention(normalised(x, layer["norm_1"]), half)
            hidden = jax.nn.gelu(normalised(x, layer["norm_2"]) @ half["up"] + half["bias_up"])
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
            x = x + jnp.where(keep, hidden @ half["down"] + half["bias_down"], 0) / jnp.bfloat16(0.9)
    return x @ weights["words"].T.astype(jnp.bfloat16)


def loss(weights: Any, words: Any, key: Any) -> Any:
    said = jax.nn.log_softmax(model(weights, words[:, :-1], key).astype(jnp.float32))
    return -jnp.take_along_axis(said, words[:, 1:, None], -1).mean()


def step(state: Any, words: Any, number: Any) -> Any:
    weights, mean, square = state
    key = jax.random.fold_in(jax.random.key(0), number)
    now, gradients = jax.value_and_grad(loss)(weights, words, key)
    with jax.named_scope("optimizer"):
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradients)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, gradients)
        weights = jax.tree.map(lambda w, m, s: w - 1e-3 * m / (jnp.sqrt(s) + 1e-8), weights, mean, square)
    return (weights, mean, square), now


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    first = weights(jax.random.key(1), options.layers, options.width)
    state = (first, jax.tree.map(jnp.zeros_like, first), jax.tree.map(jnp.zeros_like, first))
    words = jnp.array(np.random.default_rng(0).integers(0, WORDS, (BATCH, LENGTH + 1)))
    training = jax.jit(step, donate_argnums=0)
    now = began_s = 0.0
    for number in range(options.steps):
        state, now = training(state, words, number)
        now.block_until_ready()
        if number == 0:
            began_s = time.perf_counter()
        smaragdine.mark("step_end", number)
    each_ms = (time.perf_counter() - began_s) / max(options.steps - 1, 1) * 1e3
    print(f"loss {float(now):.3f}, {each_ms:.2f} ms a step")


if __name__ == "__main__":
    main()
