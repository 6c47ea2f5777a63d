"""BERT and ALBERT in Keras 3, with random weights: pre-training, fine-tuning and prediction.

    KERAS_BACKEND=jax smaragdine run experiments/study/keras_bert.py --model albert --layers 4 --hidden 128

KERAS_BACKEND is tensorflow, jax or torch. Only JAX compiles the model; on the other two, operations stay
apart.
"""

import itertools

import keras
import numpy as np
from data import batches
from keras_models import Shape, model_of
from options import announce_steps, options_of, steps_of

BATCHES = 32  # made beforehand, so that a step is nothing but computing
BACKEND = keras.backend.backend()


class Enough(keras.callbacks.Callback):
    """Ends the loop after the time and steps asked for, counted from the end of the first, which compiles.

    It waits for every step, as a session of TensorFlow 1 does.
    """

    def __init__(self, options):
        super().__init__()
        self.more = steps_of(options)
        self.means = []  # of the losses of all steps so far, as Keras keeps them
        self.step_end = announce_steps()

    def on_train_batch_end(self, batch, logs=None):
        self.means.append(logs["loss"])
        self.model.stop_training = next(self.more, None) is None

    def on_predict_batch_end(self, batch, logs=None):
        self.step_end(batch)
        self.model.stop_predicting = next(self.more, None) is None


def examples_of(batch, stage):
    """Inputs, targets and weights, as `fit` and `predict` take them."""
    inputs = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    if stage == "predict":
        return (inputs,)
    if stage == "finetune":
        return inputs, batch["labels"]
    inputs["masked_positions"] = batch["masked_positions"]
    targets = {
        "predictions": batch["masked_ids"].reshape(-1),
        "seq_relationship": batch["next_sentence_label"],
    }
    weights = {
        "predictions": batch["masked_weights"].reshape(-1),
        "seq_relationship": np.ones(len(batch["next_sentence_label"]), np.float32),
    }
    return inputs, targets, weights


def endless(examples):
    yield from itertools.cycle(examples)


def train(model, examples, options):
    """The loss of every step."""
    model.compile(
        keras.optimizers.AdamW(options.rate, weight_decay=0.01, name="AdamW"),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
        jit_compile=BACKEND == "jax",
    )
    enough = Enough(options)
    model.fit(endless(examples), shuffle=False, verbose=0, callbacks=[enough])
    return np.diff(np.arange(len(enough.means) + 1) * [0.0, *enough.means])


def predict(model, examples, options):
    """The class of every sentence."""
    model.compile(jit_compile=BACKEND == "jax")
    return model.predict(endless(examples), verbose=0, callbacks=[Enough(options)]).argmax(-1)


def set_precision(precision):
    if precision == "bf16":
        keras.config.set_dtype_policy("mixed_bfloat16")
    if BACKEND == "tensorflow":
        import tensorflow

        tensorflow.config.experimental.enable_tensor_float_32_execution(precision == "tf32")
    elif BACKEND == "torch":
        import torch

        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    elif BACKEND == "jax" and precision != "bf16":
        import jax

        exact = "tensorfloat32" if precision == "tf32" else "float32"
        jax.config.update("jax_default_matmul_precision", exact)


def main(words=None):
    options = options_of(__doc__, words)
    keras.utils.set_random_seed(options.seed)
    set_precision(options.precision)
    made, line = batches(options)
    print(line, flush=True)
    examples = [examples_of(batch, options.stage) for batch in itertools.islice(made, BATCHES)]
    shape = Shape(
        options.model, options.layers, options.hidden, options.heads, options.length, options.vocabulary
    )
    model = model_of(shape, options.stage)
    size = model.count_params()
    print(f"model: {options.model}, {size} parameters, {options.precision} on {BACKEND}", flush=True)
    if options.stage == "predict":
        classes = predict(model, examples, options)
        print(f"steps: {len(classes) // options.batch}, acceptable: {classes.mean():.4f}", flush=True)
        return
    losses = train(model, examples, options)
    print(f"steps: {len(losses)}, loss: {losses[0]:.4f} at first, {losses[-1]:.4f} at last", flush=True)
    if not np.isfinite(losses[-1]):
        raise SystemExit(f"the loss after {len(losses)} steps is {losses[-1]}")


if __name__ == "__main__":
    main()
