"""BERT and ALBERT in Keras 3, for any backend, in the scopes of BERT's reference program:

    bert/embeddings/word_embeddings             bert/encoder/layer_0/intermediate/dense
    bert/encoder/layer_0/attention/self/query   bert/encoder/layer_0/output/dense
    bert/encoder/layer_0/attention/output/dense bert/pooler/dense
    cls/predictions/transform/dense             cls/seq_relationship, cls/classifier

Every scope is a functional model, so that Keras knows how data flows between the parts. BERT's dense layers
multiply matrices that have a row for each token. ALBERT's are einsums, the same ones in all its transformers.
"""

from typing import NamedTuple

import keras
from keras import layers, ops

EMBEDDING = 128  # ALBERT's width of a token before the encoder
KINDS, POSITIONS = 2, 512
DROPOUT = {"bert": 0.1, "albert": 0.0}
EPSILON = 1e-12
MASKED = -10000.0  # a score that attention leaves out
ROOT = ""  # no scope of its own: `bert` and `cls` stand side by side, as in the reference


class Shape(NamedTuple):
    model: str
    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int

    @property
    def embedding(self):
        return EMBEDDING if self.model == "albert" else self.hidden

    @property
    def head(self):
        return self.hidden // self.heads

    @property
    def dropout(self):
        return DROPOUT[self.model]


class Transformer(NamedTuple):
    """The layers with weights that a transformer is made of."""

    query: layers.Layer
    key: layers.Layer
    value: layers.Layer
    attention_dense: layers.Layer
    attention_norm: layers.Layer
    intermediate_dense: layers.Layer
    output_dense: layers.Layer
    output_norm: layers.Layer


class Einsum(layers.Layer):
    """One operation on TensorFlow too: without an option Keras turns some einsums into matrix products."""

    def __init__(self, equation, **kwargs):
        super().__init__(**kwargs)
        self.equation = equation

    def call(self, x, y):
        return ops.einsum(self.equation, x, y, optimize="greedy")


class EinsumDense(layers.Layer):
    def __init__(self, equation, kernel, bias, **kwargs):
        super().__init__(**kwargs)
        self.equation, self.shapes = equation, (kernel, bias)

    def build(self, shape):
        self.kernel = self.add_weight(shape=self.shapes[0], initializer=_normal(), name="kernel")
        self.bias = self.add_weight(shape=self.shapes[1], initializer="zeros", name="bias")

    def call(self, x):
        return ops.einsum(self.equation, x, self.kernel, optimize="greedy") + self.bias


class PositionEmbeddings(layers.Layer):
    def build(self, shape):
        self.length = shape[1]
        size = (max(POSITIONS, self.length), shape[2])
        self.table = self.add_weight(shape=size, initializer=_normal(), name="embeddings")

    def call(self, x):
        return x + self.table[: self.length]


class Gather(layers.Layer):
    """The rows of the tokens at some positions of each sequence."""

    def call(self, x, positions):
        count, length, width = ops.shape(x)
        first = ops.expand_dims(ops.arange(count, dtype="int32") * length, 1)
        return ops.take(ops.reshape(x, (-1, width)), ops.reshape(positions + first, (-1,)), axis=0)


class Decoder(layers.Layer):
    """Turns a token's row into a score for each word, by the table that the words were embedded with."""

    def __init__(self, words, **kwargs):
        super().__init__(**kwargs)
        self.words = words

    def build(self, shape):
        self.bias = self.add_weight(shape=(self.words.input_dim,), initializer="zeros", name="bias")

    def call(self, x):
        return ops.matmul(x, ops.transpose(ops.cast(self.words.embeddings, x.dtype))) + self.bias


def model_of(shape, stage):
    """It outputs scores: in pre-training of masked words and of the second sentence, else of classes."""
    names = ("input_ids", "token_type_ids", "attention_mask")
    inputs = {name: keras.Input((shape.length,), dtype="int32", name=name) for name in names}
    words = layers.Embedding(
        shape.vocabulary, shape.embedding, embeddings_initializer=_normal(), name="word_embeddings"
    )
    sequence, pooled = _bert(shape, words)([inputs[name] for name in names])
    if stage == "pretrain":
        inputs["masked_positions"] = keras.Input((None,), dtype="int32", name="masked_positions")
        outputs = _pretraining(shape, words)([sequence, pooled, inputs["masked_positions"]])
    else:
        outputs = _classifier(shape)(pooled)
    return keras.Model(inputs, outputs, name=ROOT)


def _bert(shape, words):
    ids, kinds, mask = (keras.Input((shape.length,), dtype="int32") for _ in range(3))
    sequence = _encoder(shape)([_embeddings(shape, words)([ids, kinds]), mask])
    return keras.Model([ids, kinds, mask], [sequence, _pooler(shape)(sequence)], name="bert")


def _embeddings(shape, words):
    ids, kinds = (keras.Input((shape.length,), dtype="int32") for _ in range(2))
    kind = layers.Embedding(
        KINDS, shape.embedding, embeddings_initializer=_normal(), name="token_type_embeddings"
    )
    x = PositionEmbeddings(name="position_embeddings")(words(ids) + kind(kinds))
    x = layers.Dropout(shape.dropout, name="dropout")(_norm()(x))
    return keras.Model([ids, kinds], x, name="embeddings")


def _encoder(shape):
    tokens, mask = _input(shape.length, shape.embedding), keras.Input((shape.length,), dtype="int32")
    added = ops.reshape((1 - ops.cast(mask, tokens.dtype)) * MASKED, (-1, 1, 1, shape.length))
    if shape.model == "albert":
        size = (shape.embedding, shape.hidden)
        x = _einsum_dense("bse,eh->bsh", size, "embedding_hidden_mapping_in")(tokens)
        parts = [_einsum_parts(shape)] * shape.layers
    else:
        x = ops.reshape(tokens, (-1, shape.hidden))
        parts = [_dense_parts(shape) for _ in range(shape.layers)]
    for number, part in enumerate(parts):
        x = _layer(shape, part, f"layer_{number}")([x, added])
    return keras.Model([tokens, mask], ops.reshape(x, (-1, shape.length, shape.hidden)), name="encoder")


def _dense_parts(shape):
    hidden, inner = shape.hidden, 4 * shape.hidden
    attention = (_dense(hidden, name) for name in ("query", "key", "value", "dense"))
    return Transformer(*attention, _norm(), _dense(inner), _dense(hidden), _norm())


def _einsum_parts(shape):
    hidden, inner, heads = shape.hidden, 4 * shape.hidden, (shape.heads, shape.head)
    return Transformer(
        *(
            _einsum_dense("bsh,hnd->bsnd", (hidden, *heads), name, heads)
            for name in ("query", "key", "value")
        ),
        _einsum_dense("bsnd,ndh->bsh", (*heads, hidden)),
        _norm(),
        _einsum_dense("bsh,hi->bsi", (hidden, inner)),
        _einsum_dense("bsi,ih->bsh", (inner, hidden)),
        _norm(),
    )


def _layer(shape, parts, name):
    tokens, mask = _tokens(shape, shape.hidden), _input(1, 1, shape.length)
    x = _attention(shape, parts)([tokens, mask])
    inner = _intermediate(shape, parts)(x)
    x = _output(shape, parts.output_dense, parts.output_norm, 4 * shape.hidden)([inner, x])
    return keras.Model([tokens, mask], x, name=name)


def _attention(shape, parts):
    tokens, mask = _tokens(shape, shape.hidden), _input(1, 1, shape.length)
    attend = _einsum_self if shape.model == "albert" else _self
    context = attend(shape, parts)([tokens, mask])
    width = (shape.heads, shape.head) if shape.model == "albert" else shape.hidden
    output = _output(shape, parts.attention_dense, parts.attention_norm, width)
    return keras.Model([tokens, mask], output([context, tokens]), name="attention")


def _self(shape, parts):
    tokens, mask = _tokens(shape, shape.hidden), _input(1, 1, shape.length)

    def split(x):
        return ops.transpose(ops.reshape(x, (-1, shape.length, shape.heads, shape.head)), (0, 2, 1, 3))

    query, key, value = (split(dense(tokens)) for dense in parts[:3])
    scores = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))) * shape.head**-0.5 + mask
    weights = layers.Dropout(shape.dropout, name="dropout")(ops.softmax(scores))
    context = ops.transpose(ops.matmul(weights, value), (0, 2, 1, 3))
    return keras.Model([tokens, mask], ops.reshape(context, (-1, shape.hidden)), name="self")


def _einsum_self(shape, parts):
    tokens, mask = _tokens(shape, shape.hidden), _input(1, 1, shape.length)
    query, key, value = (dense(tokens) for dense in parts[:3])
    scores = Einsum("bfnd,btnd->bnft", name="scores")(query, key) * shape.head**-0.5 + mask
    weights = layers.Dropout(shape.dropout, name="dropout")(ops.softmax(scores))
    context = Einsum("bnft,btnd->bfnd", name="context")(weights, value)
    return keras.Model([tokens, mask], context, name="self")


def _intermediate(shape, parts):
    tokens = _tokens(shape, shape.hidden)
    return keras.Model(tokens, _gelu(parts.intermediate_dense(tokens)), name="intermediate")


def _output(shape, dense, norm, width):
    """Back to the model's width, with the residual connection around it."""
    x, around = _tokens(shape, width), _tokens(shape, shape.hidden)
    found = layers.Dropout(shape.dropout, name="dropout")(dense(x))
    return keras.Model([x, around], norm(found + around), name="output")


def _pooler(shape):
    sequence = _input(shape.length, shape.hidden)
    pooled = ops.tanh(_dense(shape.hidden)(sequence[:, 0]))
    return keras.Model(sequence, pooled, name="pooler")


def _classifier(shape):
    pooled = _input(shape.hidden)
    scores = _dense(2, "classifier")(layers.Dropout(shape.dropout, name="dropout")(pooled))
    return keras.Model(pooled, scores, name="cls")


def _pretraining(shape, words):
    sequence, pooled = _input(shape.length, shape.hidden), _input(shape.hidden)
    positions = keras.Input((None,), dtype="int32")
    outputs = {
        "predictions": _predictions(shape, words)([sequence, positions]),
        "seq_relationship": _dense(2, "seq_relationship")(pooled),
    }
    return keras.Model([sequence, pooled, positions], outputs, name="cls")


def _predictions(shape, words):
    sequence, positions = _input(shape.length, shape.hidden), keras.Input((None,), dtype="int32")
    rows = _input(shape.hidden)
    transform = keras.Model(rows, _norm()(_gelu(_dense(shape.embedding)(rows))), name="transform")
    x = Decoder(words, name="decoder")(transform(Gather(name="gather")(sequence, positions)))
    return keras.Model([sequence, positions], x, name="predictions")


def _dense(width, name="dense"):
    return layers.Dense(width, kernel_initializer=_normal(), name=name)


def _einsum_dense(equation, kernel, name="dense", bias=None):
    return EinsumDense(equation, kernel, bias or kernel[-1:], name=name)


def _norm():
    return layers.LayerNormalization(epsilon=EPSILON, name="LayerNorm")


def _normal():
    # One of its own for each weight: used twice, an initializer would give the same numbers.
    return keras.initializers.TruncatedNormal(stddev=0.02)


def _gelu(x):
    return ops.gelu(x, approximate=True)


def _tokens(shape, width):
    width = width if isinstance(width, tuple) else (width,)
    return _input(shape.length, *width) if shape.model == "albert" else _input(*width)


def _input(*size):
    # What layers compute in: any other would be converted to at the door of every scope.
    return keras.Input(size, dtype=keras.config.dtype_policy().compute_dtype)
