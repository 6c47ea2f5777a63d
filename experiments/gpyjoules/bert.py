"""BERT fine-tuning on sentence pairs of 128 tokens, in PyTorch.

    smaragdine run experiments/gpyjoules/bert.py --epochs 3 --batch 32 --precision bf16

Weights and tokenizer come from --model (a name or a folder of Hugging Face); otherwise they are random, of
the same shape. Sentences come from --data FILE (lines of label TAB sentence; needs --model); otherwise they
are generated.
"""

import argparse

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig
from transformers import BertForSequenceClassification as Bert

LENGTH, SENTENCES = 128, 3668  # as MRPC has
SIZES = {
    "base": {},
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 2000,
    },
}


def model_of(options):
    if options.model:
        return AutoModelForSequenceClassification.from_pretrained(options.model)
    torch.manual_seed(0)
    return Bert(BertConfig(**SIZES[options.size]))


def batches(options, vocabulary, device):
    """One epoch: token ids and labels of every step."""
    count = (options.steps or SENTENCES // options.batch) * options.batch
    if options.data:
        with open(options.data, encoding="utf-8") as file:
            rows = [line.rstrip("\n").split("\t", 1) for line in file][:count]
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        found = tokenizer(
            [text for _, text in rows],
            padding="max_length",
            truncation=True,
            max_length=LENGTH,
            return_tensors="pt",
        )
        ids, labels = found["input_ids"], torch.tensor([int(label) for label, _ in rows])
    else:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, 2, (count,), generator=generator)
        # The label is in the first half of the words, so that there is something to learn.
        ids = torch.randint(5, vocabulary // 2, (count, LENGTH), generator=generator)
        ids += labels[:, None] * (vocabulary // 2 - 5)
    ids, labels = ids.to(device), labels.to(device)
    return list(zip(ids.split(options.batch), labels.split(options.batch), strict=True))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, help=f"steps in an epoch (default: {SENTENCES} sentences once)")
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="fp32")
    parser.add_argument("--size", choices=tuple(SIZES), default="base")
    parser.add_argument("--model", help="a model of Hugging Face: bert-base-uncased, or a folder")
    parser.add_argument("--data", help="a file with lines of label TAB sentence")
    options = parser.parse_args()
    if options.data and not options.model:
        parser.error("--data needs --model, for its tokenizer")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = options.precision == "tf32"
    model = model_of(options).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    epoch_of = batches(options, model.config.vocab_size, device)
    print(f"steps: {len(epoch_of)} on {device}, {options.precision}", flush=True)
    for epoch in range(options.epochs):
        total = torch.zeros((), device=device)
        for ids, labels in epoch_of:
            with torch.autocast(device, torch.bfloat16, enabled=options.precision == "bf16"):
                loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        print(f"epoch {epoch}: loss {total.item() / len(epoch_of):.4f}", flush=True)


if __name__ == "__main__":
    main()
