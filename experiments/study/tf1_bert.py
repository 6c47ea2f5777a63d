"""BERT as a graph of TensorFlow 1, with random weights: pre-training, fine-tuning and prediction.

    smaragdine run experiments/study/tf1_bert.py --stage finetune --layers 4 --hidden 128

Scopes and operations are those of BERT's reference program. It also runs as that program does: in a monitored
session, with a hook of smaragdine's, if that is installed.
"""

import itertools
import math

import tensorflow
import tensorflow.compat.v1 as tf
from data import batches
from options import options_of, steps_of

BATCHES = 32  # made beforehand, so that a step is nothing but computing
KINDS, POSITIONS = 2, 512
DROPOUT = 0.1
MASKED = -10000.0  # a score that attention leaves out


def graph_of(options, inputs):
    """What a step runs, and what it returns: the loss, or the classes."""
    # bf16 is what is computed in; weights stay as they are.
    compute = tf.bfloat16 if options.precision == "bf16" else tf.float32
    dropout = 0.0 if options.stage == "predict" else DROPOUT
    sequence, pooled, words = _bert(options, inputs, compute, dropout)
    if options.stage == "pretrain":
        loss = _pretraining_loss(options, inputs, sequence, pooled, words)
    else:
        with tf.variable_scope("cls"):
            scores = _dense(_dropout(pooled, dropout), 2, name="classifier")
            if options.stage == "predict":
                return (), tf.argmax(scores, -1)
            loss = _loss(scores, inputs["labels"])
    step = tf.train.get_or_create_global_step()
    return tf.train.AdamOptimizer(options.rate).minimize(loss, global_step=step), loss


def _bert(options, inputs, compute, dropout):
    """All tokens as rows, the first token of each sequence, and the table of words."""
    with tf.variable_scope("bert"):
        with tf.variable_scope("embeddings"):
            x, words = _embeddings(options, inputs, dropout)
        with tf.variable_scope("encoder"):
            left_out = (1.0 - tf.cast(inputs["attention_mask"], tf.float32)) * MASKED
            mask = tf.cast(left_out, compute)[:, tf.newaxis, tf.newaxis]
            x = tf.reshape(tf.cast(x, compute), [-1, options.hidden])
            for number in range(options.layers):
                with tf.variable_scope(f"layer_{number}"):
                    x = _layer(options, x, mask, dropout)
        with tf.variable_scope("pooler"):
            first = tf.reshape(x, [-1, options.length, options.hidden])[:, 0]
            with tf.variable_scope("dense"):
                return x, tf.tanh(_product(first, options.hidden)), words


def _embeddings(options, inputs, dropout):
    width = options.hidden
    words = _weight("word_embeddings", [options.vocabulary, width])
    kinds = _weight("token_type_embeddings", [KINDS, width])
    positions = _weight("position_embeddings", [max(POSITIONS, options.length), width])
    x = tf.gather(words, inputs["input_ids"]) + tf.gather(kinds, inputs["token_type_ids"])
    return _dropout(_norm(x + positions[: options.length]), dropout), words


def _layer(options, x, mask, dropout):
    with tf.variable_scope("attention"):
        with tf.variable_scope("self"):
            context = _attention(options, x, mask, dropout)
        with tf.variable_scope("output"):
            x = _norm(_dropout(_dense(context, options.hidden), dropout) + x)
    with tf.variable_scope("intermediate"):
        inner = _dense(x, 4 * options.hidden, _gelu)
    with tf.variable_scope("output"):
        return _norm(_dropout(_dense(inner, options.hidden), dropout) + x)


def _attention(options, x, mask, dropout):
    head = options.hidden // options.heads

    def split(name):
        rows = tf.reshape(_dense(x, options.hidden, name=name), [-1, options.length, options.heads, head])
        return tf.transpose(rows, [0, 2, 1, 3])

    query, key, value = (split(name) for name in ("query", "key", "value"))
    scores = tf.matmul(query, key, transpose_b=True) * head**-0.5 + mask
    context = tf.matmul(_dropout(tf.nn.softmax(scores), dropout), value)
    return tf.reshape(tf.transpose(context, [0, 2, 1, 3]), [-1, options.hidden])


def _pretraining_loss(options, inputs, sequence, pooled, words):
    with tf.variable_scope("cls"):
        with tf.variable_scope("predictions"):
            positions = inputs["masked_positions"]
            first = tf.range(tf.shape(positions)[0])[:, tf.newaxis] * options.length
            rows = tf.gather(sequence, tf.reshape(positions + first, [-1]))
            with tf.variable_scope("transform"):
                rows = _norm(_dense(rows, options.hidden, _gelu))
            bias = tf.get_variable("output_bias", [options.vocabulary], initializer=tf.zeros_initializer())
            scores = tf.matmul(rows, tf.cast(words, rows.dtype), transpose_b=True)
            scores = tf.nn.bias_add(scores, tf.cast(bias, rows.dtype))
            masked_ids, weights = (tf.reshape(inputs[f"masked_{name}"], [-1]) for name in ("ids", "weights"))
            masked = _loss(scores, masked_ids, weights)
        with tf.variable_scope("seq_relationship"):
            return masked + _loss(_product(pooled, 2), inputs["next_sentence_label"])


def _loss(scores, labels, weights=None):
    with tf.variable_scope("loss"):
        scores = tf.cast(scores, tf.float32)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores)
        if weights is None:
            return tf.reduce_mean(each)
        return tf.reduce_sum(each * weights) / (tf.reduce_sum(weights) + 1e-5)


def _dense(x, width, activation=None, name="dense"):
    with tf.variable_scope(name):
        x = _product(x, width)
        return x if activation is None else activation(x)


def _product(x, width):
    kernel = tf.cast(_weight("kernel", [x.shape[-1], width]), x.dtype)
    bias = tf.cast(tf.get_variable("bias", [width], initializer=tf.zeros_initializer()), x.dtype)
    return tf.nn.bias_add(tf.matmul(x, kernel), bias)


def _norm(x):
    with tf.variable_scope("LayerNorm"):
        gamma = tf.get_variable("gamma", x.shape[-1:], initializer=tf.ones_initializer())
        beta = tf.get_variable("beta", x.shape[-1:], initializer=tf.zeros_initializer())
        # Squares of bf16 would lose what they are summed for.
        exact = tf.cast(x, tf.float32)
        mean, variance = tf.nn.moments(exact, [-1], keepdims=True)
        found = tf.nn.batch_normalization(exact, mean, variance, beta, gamma, 1e-12)
        return tf.cast(found, x.dtype)


def _gelu(x):
    return x * 0.5 * (1.0 + tf.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * tf.pow(x, 3))))


def _dropout(x, rate):
    return tf.nn.dropout(x, rate=rate) if rate else x


def _weight(name, size):
    return tf.get_variable(name, size, initializer=tf.truncated_normal_initializer(stddev=0.02))


def hooks():
    try:
        from smaragdine import SessionRunHook
    except ImportError:
        return []
    return [SessionRunHook()]


def run(options, examples):
    """What every step returned."""
    inputs = {
        name: tf.placeholder(tf.as_dtype(values.dtype), [None, *values.shape[1:]], name)
        for name, values in examples[0].items()
    }
    if options.stage == "pretrain":
        del inputs["labels"]  # the same once more, for others
    step, asked = graph_of(options, inputs)
    size = sum(math.prod(variable.shape.as_list()) for variable in tf.trainable_variables())
    print(f"model: bert, {size} parameters, {options.precision} on tensorflow 1", flush=True)
    answers = []
    with tf.train.MonitoredTrainingSession(hooks=hooks()) as session:
        for _, example in zip(steps_of(options), itertools.cycle(examples), strict=False):
            feed = {tensor: example[name] for name, tensor in inputs.items()}
            answers.append(session.run([step, asked], feed)[1])
    return answers


def main(words=None):
    options = options_of(__doc__, words)
    if options.model == "albert":
        raise SystemExit("tf1_bert.py has BERT alone: keras_bert.py has ALBERT")
    made, line = batches(options)
    print(line, flush=True)
    tf.disable_eager_execution()
    tf.set_random_seed(options.seed)
    tensorflow.config.experimental.enable_tensor_float_32_execution(options.precision == "tf32")
    answers = run(options, list(itertools.islice(made, BATCHES)))
    if options.stage == "predict":
        part = sum(map(sum, answers)) / (len(answers) * options.batch)
        print(f"steps: {len(answers)}, acceptable: {part:.4f}", flush=True)
        return
    print(f"steps: {len(answers)}, loss: {answers[0]:.4f} at first, {answers[-1]:.4f} at last", flush=True)
    if not math.isfinite(answers[-1]):
        raise SystemExit(f"the loss after {len(answers)} steps is {answers[-1]}")


if __name__ == "__main__":
    main()
