"""A BERT in JAX to trace: random weights, random tokens, bf16 products, AdamW by hand.

    python bench/bert_jax.py [--steps 50] [--layers 12] [--hidden 768] [--batch 32] [--json FILE] [--plain]

`--json` keeps [begin_ns, end_ns] of every step (Unix time; each step waits for its result). The modules are
Flax's. With `--plain`, or without Flax, it is the same model in named scopes of JAX alone. It knows nothing
of Smaragdine.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

try:
    import flax.linen as nn
except ImportError:
    nn = None

VOCABULARY, LENGTH = 30522, 128


def attend(query: Any, key: Any, value: Any, heads: int) -> Any:
    batch, length, hidden = query.shape
    query, key, value = (each.reshape(batch, length, heads, -1) for each in (query, key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(hidden // heads)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(query.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, length, hidden)


if nn is not None:
    Dense, Norm, Embed = nn.Dense, nn.LayerNorm, nn.Embed

    class Attention(nn.Module):
        heads: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            query, key, value = (
                Dense(x.shape[-1], dtype=jnp.bfloat16, name=name)(x) for name in ("query", "key", "value")
            )
            mixed = attend(query, key, value, self.heads)
            return Norm(name="norm")(x + Dense(x.shape[-1], dtype=jnp.bfloat16, name="output")(mixed))

    class Layer(nn.Module):
        heads: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = Attention(self.heads, name="attention")(x)
            up = nn.gelu(Dense(4 * x.shape[-1], dtype=jnp.bfloat16, name="up")(x))
            return Norm(name="norm")(x + Dense(x.shape[-1], dtype=jnp.bfloat16, name="down")(up))

    class Embeddings(nn.Module):
        hidden: int

        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            words = Embed(VOCABULARY, self.hidden, name="words")(tokens)
            return Norm(name="norm")(words + Embed(LENGTH, self.hidden, name="places")(jnp.arange(LENGTH)))

    class Bert(nn.Module):
        layers: int
        hidden: int
        heads: int

        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            x = Embeddings(self.hidden, name="embeddings")(tokens)
            for number in range(self.layers):
                x = Layer(self.heads, name=f"layer_{number}")(x)
            return Dense(2, dtype=jnp.bfloat16, name="classifier")(x[:, 0]).astype(jnp.float32)


def plain_weights(layers: int, hidden: int) -> dict[str, Any]:
    """The weights, with the same keys as Flax's."""
    keys = iter(jax.random.split(jax.random.key(0), 8 * layers + 8))

    def matrix(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) * 0.02

    def dense(inside: int, out: int) -> dict[str, Any]:
        return {"kernel": matrix(inside, out), "bias": jnp.zeros(out)}

    def norm() -> dict[str, Any]:
        return {"scale": jnp.ones(hidden), "bias": jnp.zeros(hidden)}

    words, places = ({"embedding": matrix(rows, hidden)} for rows in (VOCABULARY, LENGTH))
    weights: dict[str, Any] = {"embeddings": {"words": words, "places": places, "norm": norm()}}
    for number in range(layers):
        products = {name: dense(hidden, hidden) for name in ("query", "key", "value", "output")}
        up, down = dense(hidden, 4 * hidden), dense(4 * hidden, hidden)
        attention = {**products, "norm": norm()}
        weights[f"layer_{number}"] = {"attention": attention, "up": up, "down": down, "norm": norm()}
    return {**weights, "classifier": dense(hidden, 2)}


def plain_model(weights: dict[str, Any], tokens: Any, heads: int) -> Any:
    def dense(all_of: dict[str, Any], name: str, x: Any) -> Any:
        with jax.named_scope(name):
            kernel, bias = (all_of[name][key].astype(jnp.bfloat16) for key in ("kernel", "bias"))
            return x.astype(jnp.bfloat16) @ kernel + bias

    def norm(all_of: dict[str, Any], x: Any) -> Any:
        with jax.named_scope("norm"):
            x = x.astype(jnp.float32)
            x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
            return x * all_of["norm"]["scale"] + all_of["norm"]["bias"]

    with jax.named_scope("Bert"):
        with jax.named_scope("embeddings"):
            mine = weights["embeddings"]
            with jax.named_scope("words"):
                words = mine["words"]["embedding"][tokens]
            with jax.named_scope("places"):
                places = mine["places"]["embedding"][jnp.arange(LENGTH)]
            x = norm(mine, words + places)
        for name in (name for name in weights if name.startswith("layer_")):
            with jax.named_scope(name):
                mine = weights[name]
                with jax.named_scope("attention"):
                    inside = mine["attention"]
                    mixed = attend(*(dense(inside, part, x) for part in ("query", "key", "value")), heads)
                    x = norm(inside, x + dense(inside, "output", mixed))
                x = norm(mine, x + dense(mine, "down", jax.nn.gelu(dense(mine, "up", x))))
        return dense(weights, "classifier", x[:, 0]).astype(jnp.float32)


def adamw(weights: Any, gradients: Any, state: Any, rate: float = 1e-4) -> tuple[Any, Any]:
    count, first, second = state
    count = count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradients)

    def updated(w: Any, m: Any, v: Any) -> Any:
        change = (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)
        return w - rate * (change + 0.01 * w)

    return jax.tree.map(updated, weights, first, second), (count, first, second)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    heads = max(1, options.hidden // 64)
    tokens = jax.random.randint(jax.random.key(1), (options.batch, LENGTH), 0, VOCABULARY)
    classes = jax.random.randint(jax.random.key(2), (options.batch,), 0, 2)
    if nn is None or options.plain:
        weights = plain_weights(options.layers, options.hidden)

        def model(weights: Any, tokens: Any) -> Any:
            return plain_model(weights, tokens, heads)
    else:
        bert = Bert(options.layers, options.hidden, heads)
        weights, model = bert.init(jax.random.key(0), tokens), bert.apply

    def loss_of(weights: Any, tokens: Any, classes: Any) -> Any:
        chances = jax.nn.log_softmax(model(weights, tokens))
        return -jnp.take_along_axis(chances, classes[:, None], axis=1).mean()

    @jax.jit
    def train_step(weights: Any, state: Any, tokens: Any, classes: Any) -> tuple[Any, Any, Any]:
        loss, gradients = jax.value_and_grad(loss_of)(weights, tokens, classes)
        with jax.named_scope("optimizer"):
            weights, state = adamw(weights, gradients, state)
        return weights, state, loss

    zeros = jax.tree.map(jnp.zeros_like, weights)
    state = (jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.zeros_like, weights))
    steps: list[tuple[int, int]] = []
    loss = None
    for _ in range(options.steps):
        begin_ns = time.time_ns()
        weights, state, loss = jax.block_until_ready(train_step(weights, state, tokens, classes))
        steps.append((begin_ns, time.time_ns()))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(weights))
    middle_ns = sorted(end_ns - begin_ns for begin_ns, end_ns in steps)[len(steps) // 2] if steps else 0
    kind = "plain JAX" if nn is None or options.plain else "Flax"
    print(
        f"{kind}, jax {jax.__version__} on {jax.default_backend()}, {parameters / 1e6:.1f} million parameters"
    )
    print(f"median step {middle_ns * 1e-6:.2f} ms, last loss {loss}")
    if options.json:
        facts = {"kind": kind, "jax": jax.__version__, "loss": float(loss or 0), "steps": steps}
        options.json.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
