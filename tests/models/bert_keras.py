"""A small BERT of our own in Keras 3, for whichever backend KERAS_BACKEND names.

    python bert_keras.py STEPS [functional]

It trains for some steps and prints a digest of its weights; nothing here knows of Smaragdine. `products()`
and `scopes()` list what the code below asks for.
"""

import hashlib
import sys

LAYERS, HIDDEN, HEADS, LENGTH, VOCABULARY, CLASSES, BATCH = 2, 64, 2, 32, 97, 3, 8


def products():
    """scope → forward products, backward products of one training step.

    A product by a weight has two in its backward pass, for the weight and for its input; each of these inputs
    depends on a weight (of the embeddings, at least), so none is left out. So have the two of attention, for
    either factor.
    """
    found = {"bert/pooler/dense": (1, 2), "bert/classifier": (1, 2)}
    for number in range(LAYERS):
        layer = f"bert/encoder/layer_{number}"
        for name in ("attention/self/query", "attention/self/key", "attention/self/value"):
            found[f"{layer}/{name}"] = (1, 2)
        found[f"{layer}/attention/self"] = (2, 4)  # scores, context
        for name in ("attention/output/dense", "intermediate/dense", "output/dense"):
            found[f"{layer}/{name}"] = (1, 2)
    return found


def scopes():
    """Every layer that has weights or draws at random: those that no compiler can do without."""
    found = {*products(), "bert/embeddings/dropout"}
    found |= {f"bert/embeddings/{name}" for name in ("word_embeddings", "position_embeddings", "LayerNorm")}
    for number in range(LAYERS):
        layer = f"bert/encoder/layer_{number}"
        found.add(f"{layer}/attention/self/dropout")
        for name in ("attention/output", "output"):
            found |= {f"{layer}/{name}/dropout", f"{layer}/{name}/LayerNorm"}
    return found


def build():
    import keras
    from keras import layers, ops

    class Embeddings(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.words = layers.Embedding(VOCABULARY, HIDDEN, name="word_embeddings")
            self.places = layers.Embedding(LENGTH, HIDDEN, name="position_embeddings")
            self.norm = layers.LayerNormalization(name="LayerNorm")
            self.dropout = layers.Dropout(0.1, seed=1, name="dropout")

        def build(self, shape):
            self.words.build(shape)
            self.places.build((LENGTH,))
            self.norm.build((*shape, HIDDEN))

        def call(self, tokens, training=False):
            x = self.words(tokens) + self.places(ops.arange(LENGTH))
            return self.dropout(self.norm(x), training=training)

    class SelfAttention(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.query = layers.Dense(HIDDEN, name="query")
            self.key = layers.Dense(HIDDEN, name="key")
            self.value = layers.Dense(HIDDEN, name="value")
            self.dropout = layers.Dropout(0.1, seed=2, name="dropout")

        def build(self, shape):
            for dense in (self.query, self.key, self.value):
                dense.build(shape)

        def call(self, x, training=False):
            def split(y):
                return ops.transpose(ops.reshape(y, (-1, LENGTH, HEADS, HIDDEN // HEADS)), (0, 2, 1, 3))

            query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
            scores = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))) / (HIDDEN // HEADS) ** 0.5
            context = ops.matmul(self.dropout(ops.softmax(scores), training=training), value)
            return ops.reshape(ops.transpose(context, (0, 2, 1, 3)), (-1, LENGTH, HIDDEN))

    class Output(layers.Layer):
        """Back to the model's width, and the way around."""

        def __init__(self, seed, width=HIDDEN, **kwargs):
            super().__init__(**kwargs)
            self.width = width
            self.dense = layers.Dense(HIDDEN, name="dense")
            self.dropout = layers.Dropout(0.1, seed=seed, name="dropout")
            self.norm = layers.LayerNormalization(name="LayerNorm")

        def build(self, shape):
            self.dense.build((*shape[:-1], self.width))
            self.norm.build((*shape[:-1], HIDDEN))

        def call(self, x, around, training=False):
            return self.norm(self.dropout(self.dense(x), training=training) + around)

    class Attention(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.attend = SelfAttention(name="self")
            self.out = Output(3, name="output")

        def build(self, shape):
            self.attend.build(shape)
            self.out.build(shape)

        def call(self, x, training=False):
            return self.out(self.attend(x, training=training), x, training=training)

    class Intermediate(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = layers.Dense(4 * HIDDEN, name="dense")

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return ops.gelu(self.dense(x))

    class Block(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.attention = Attention(name="attention")
            self.intermediate = Intermediate(name="intermediate")
            self.out = Output(4, 4 * HIDDEN, name="output")

        def build(self, shape):
            self.attention.build(shape)
            self.intermediate.build(shape)
            self.out.build(shape)

        def call(self, x, training=False):
            x = self.attention(x, training=training)
            return self.out(self.intermediate(x), x, training=training)

    class Encoder(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.blocks = [Block(name=f"layer_{number}") for number in range(LAYERS)]

        def build(self, shape):
            for block in self.blocks:
                block.build(shape)

        def call(self, x, training=False):
            for block in self.blocks:
                x = block(x, training=training)
            return x

    class Pooler(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = layers.Dense(HIDDEN, activation="tanh", name="dense")

        def build(self, shape):
            self.dense.build((shape[0], HIDDEN))

        def call(self, x):
            return self.dense(x[:, 0])

    parts = [Embeddings(name="embeddings"), Encoder(name="encoder"), Pooler(name="pooler")]
    parts.append(layers.Dense(CLASSES, name="classifier"))
    if "functional" in sys.argv[2:]:
        x = tokens = keras.Input((LENGTH,), dtype="int32")
        for part in parts:
            x = part(x)
        return keras.Model(tokens, x, name="bert")

    class Bert(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.parts = parts

        def call(self, tokens, training=False):
            x = self.parts[0](tokens, training=training)
            x = self.parts[1](x, training=training)
            return self.parts[3](self.parts[2](x))

    return Bert(name="bert")


def main():
    import keras
    import numpy

    steps = int(sys.argv[1])
    keras.utils.set_random_seed(0)
    random = numpy.random.default_rng(0)
    model = build()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens = random.integers(0, VOCABULARY, (steps * BATCH, LENGTH)).astype("int32")
    classes = random.integers(0, CLASSES, (steps * BATCH,)).astype("int32")
    model.fit(tokens, classes, batch_size=BATCH, shuffle=False, verbose=0)
    digest = hashlib.sha256()
    for weights in model.get_weights():
        digest.update(numpy.ascontiguousarray(weights).tobytes())
    print(digest.hexdigest())


if __name__ == "__main__":
    main()
