"""BERT and ALBERT of Hugging Face in PyTorch, with random weights: pre-training, fine-tuning and prediction.

    smaragdine run experiments/study/torch_bert.py --model albert --stage finetune --layers 4 --hidden 128

It runs on the first GPU, if there is one.
"""

import itertools
import math

import torch
import transformers
from data import batches
from options import announce_steps, options_of, steps_of

BATCHES = 32  # made and put on the device beforehand, so that a step is nothing but computing
ACTIVATION_WIDTH = 4  # times hidden, in the feed-forward part


def model_of(options):
    size = {
        "num_hidden_layers": options.layers,
        "hidden_size": options.hidden,
        "num_attention_heads": options.heads,
        "intermediate_size": ACTIVATION_WIDTH * options.hidden,
        "vocab_size": options.vocabulary,
        "max_position_embeddings": max(512, options.length),
        "attn_implementation": options.attention,
    }
    pretrain = options.stage == "pretrain"
    if options.model == "bert":
        kind = transformers.BertForPreTraining if pretrain else transformers.BertForSequenceClassification
        return kind(transformers.BertConfig(**size))
    kind = transformers.AlbertForPreTraining if pretrain else transformers.AlbertForSequenceClassification
    return kind(transformers.AlbertConfig(**size))


def inputs_of(batch, model, device):
    """The parts of a batch that the model takes, by the model's names for them."""
    names = {name: name for name in ("input_ids", "token_type_ids", "attention_mask", "labels")}
    names["next_sentence_label"] = "sentence_order_label" if model == "albert" else "next_sentence_label"
    return {
        names[name]: torch.from_numpy(values).long().to(device)
        for name, values in batch.items()
        if name in names
    }


def train(model, inputs, options, autocast):
    """The number of steps, and the loss of the last."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    steps, loss = 0, None
    for number, batch in zip(steps_of(options), itertools.cycle(inputs), strict=False):
        with autocast:
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps = number + 1
    return steps, loss.item()


def predict(model, inputs, options, autocast):
    """The number of steps, and the part of sentences found acceptable."""
    model.eval()
    step_end = announce_steps()
    steps, acceptable, sentences = 0, 0, 0
    with torch.no_grad(), autocast:
        for number, batch in zip(steps_of(options), itertools.cycle(inputs), strict=False):
            # Whoever predicts wants the answer: a step ends when it is there.
            found = model(**batch).logits.argmax(-1).tolist()
            acceptable, sentences = acceptable + sum(found), sentences + len(found)
            step_end(number)
            steps = number + 1
    return steps, acceptable / sentences


def main(words=None):
    options = options_of(__doc__, words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high" if options.precision == "tf32" else "highest")
    made, line = batches(options)
    print(line, flush=True)
    inputs = [inputs_of(batch, options.model, device) for batch in itertools.islice(made, BATCHES)]
    model = model_of(options).to(device)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"model: {type(model).__name__}, {size} parameters, {options.precision} on {device}", flush=True)
    autocast = torch.autocast(device, torch.bfloat16, enabled=options.precision == "bf16")
    if options.stage == "predict":
        steps, part = predict(model, inputs, options, autocast)
        print(f"steps: {steps}, acceptable: {part:.4f}", flush=True)
        return
    steps, loss = train(model, inputs, options, autocast)
    print(f"steps: {steps}, loss: {loss:.4f}", flush=True)
    if not math.isfinite(loss):
        raise SystemExit(f"the loss after {steps} steps is {loss}")


if __name__ == "__main__":
    main()
