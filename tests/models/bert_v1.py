"""A small BERT as a TensorFlow 1 graph, trained on noise: `bert_v1.py STEPS [plain | monitored]`.

Prints a digest of the weights after training. `products` is what one step has to compute.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

BATCH, LENGTH, WORDS, WIDTH, HEADS, LAYERS, INNER, LABELS = 4, 16, 100, 32, 2, 2, 64, 3


def products() -> Iterator[tuple[str, int, int]]:
    """Every scope that multiplies matrices, and how often: forward, and backward.

    A product of two things that are both learned from needs two backward: one for either.
    """
    for i in range(LAYERS):
        layer = f"bert/encoder/layer_{i}"
        for name in ("query", "key", "value"):
            yield f"{layer}/attention/self/{name}", 1, 2
        yield f"{layer}/attention/self", 2, 4  # scores = query · key, context = weights · value
        yield f"{layer}/attention/output/dense", 1, 2
        yield f"{layer}/intermediate/dense", 1, 2
        yield f"{layer}/output/dense", 1, 2
    yield "bert/pooler/dense", 1, 2
    yield "cls", 1, 2


def build(tf: Any, words: Any, labels: Any) -> tuple[Any, Any]:
    """The loss and the operation that trains."""
    with tf.variable_scope("bert"):
        with tf.variable_scope("embeddings"):
            table = tf.get_variable("word_embeddings", [WORDS, WIDTH])
            places = tf.get_variable("position_embeddings", [LENGTH, WIDTH])
            x = _norm(tf, tf.gather(table, words) + places)
        x = tf.reshape(x, [-1, WIDTH])
        with tf.variable_scope("encoder"):
            for i in range(LAYERS):
                with tf.variable_scope(f"layer_{i}"):
                    x = _layer(tf, x)
        with tf.variable_scope("pooler"):
            first = tf.reshape(x, [-1, LENGTH, WIDTH])[:, 0]
            pooled = _dense(tf, first, WIDTH, tf.tanh)
    with tf.variable_scope("cls"):
        weights = tf.get_variable("output_weights", [LABELS, WIDTH])
        bias = tf.get_variable("output_bias", [LABELS], initializer=tf.zeros_initializer())
        logits = tf.nn.bias_add(tf.matmul(pooled, weights, transpose_b=True), bias)
    with tf.variable_scope("loss"):
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        loss = tf.reduce_mean(each)
    step = tf.train.get_or_create_global_step()
    return loss, tf.train.AdamOptimizer(1e-3).minimize(loss, global_step=step)


def _layer(tf: Any, x: Any) -> Any:
    with tf.variable_scope("attention"):
        with tf.variable_scope("self"):
            query, key, value = (
                _heads(tf, _dense(tf, x, WIDTH, None, name)) for name in ("query", "key", "value")
            )
            scores = tf.matmul(query, key, transpose_b=True) / (WIDTH // HEADS) ** 0.5
            context = tf.matmul(tf.nn.softmax(scores), value)
            context = tf.reshape(tf.transpose(context, [0, 2, 1, 3]), [-1, WIDTH])
        with tf.variable_scope("output"):
            x = _norm(tf, _dense(tf, context, WIDTH) + x)
    with tf.variable_scope("intermediate"):
        inner = _dense(tf, x, INNER, tf.nn.relu)
    with tf.variable_scope("output"):
        return _norm(tf, _dense(tf, inner, WIDTH) + x)


def _heads(tf: Any, x: Any) -> Any:
    return tf.transpose(tf.reshape(x, [-1, LENGTH, HEADS, WIDTH // HEADS]), [0, 2, 1, 3])


def _dense(tf: Any, x: Any, width: int, activation: Any = None, name: str = "dense") -> Any:
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [x.shape[-1], width])
        bias = tf.get_variable("bias", [width], initializer=tf.zeros_initializer())
        x = tf.nn.bias_add(tf.matmul(x, kernel), bias)
        return x if activation is None else activation(x)


def _norm(tf: Any, x: Any) -> Any:
    with tf.variable_scope("LayerNorm"):
        gamma = tf.get_variable("gamma", [WIDTH], initializer=tf.ones_initializer())
        beta = tf.get_variable("beta", [WIDTH], initializer=tf.zeros_initializer())
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) * tf.rsqrt(variance + 1e-6) * gamma + beta


def main(steps: int, kind: str = "plain") -> None:
    import numpy as np
    import tensorflow

    tf = tensorflow.compat.v1
    tf.disable_eager_execution()
    tf.set_random_seed(1)
    random = np.random.default_rng(0)
    words = tf.placeholder(tf.int32, [None, LENGTH], "words")
    labels = tf.placeholder(tf.int32, [None], "labels")
    loss, train = build(tf, words, labels)
    # One thread: sums of gradients come in one order.
    config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    if kind == "monitored":
        session = tf.train.MonitoredTrainingSession(config=config)
    else:
        session = tf.Session(config=config)
        session.run(tf.global_variables_initializer())
    with session:
        for _ in range(steps):
            feed = {
                words: random.integers(0, WORDS, (BATCH, LENGTH)),
                labels: random.integers(0, LABELS, BATCH),
            }
            session.run([train, loss], feed)
        digest = hashlib.sha256()
        for value in session.run(tf.trainable_variables(), feed):
            digest.update(np.asarray(value).tobytes())
    print(digest.hexdigest())


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
