"""The options that the programs of the study share, and how long the programs run."""

import argparse
import time
from pathlib import Path

from wordpiece import load_vocabulary

VOCABULARY = {"bert": 30522, "albert": 30000}
SMALLEST_VOCABULARY = 64  # special and counting words, and some for each topic of generated text


def options_of(description, words=None):
    """The options of the command line, with every default filled in."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("bert", "albert"), default="bert")
    parser.add_argument("--stage", choices=("pretrain", "finetune", "predict"), default="pretrain")
    parser.add_argument("--layers", type=_positive, default=12)
    parser.add_argument("--hidden", type=_positive, default=768)
    parser.add_argument("--heads", type=_positive, help="heads of attention (default: hidden/64)")
    parser.add_argument("--batch", type=_positive, default=32)
    parser.add_argument("--length", type=_positive, default=128, help="length of a sequence, in tokens")
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="fp32")
    parser.add_argument("--seconds", type=float, default=10.0, help="run for at least this long")
    parser.add_argument("--steps", type=int, default=0, help="and make at least this many steps")
    parser.add_argument(
        "--vocabulary",
        type=_positive,
        help="how many words (default: those of vocab.txt, else the model's own)",
    )
    parser.add_argument("--rate", type=float, default=2e-5, help="learning rate")
    parser.add_argument(
        "--data", type=Path, help="a folder with CoLA's files or text; without it data is generated"
    )
    parser.add_argument(
        "--attention", choices=("eager", "sdpa"), default="eager", help="how PyTorch computes attention"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    options.heads = options.heads or max(1, options.hidden // 64)
    if options.hidden % options.heads:
        parser.error(f"--hidden {options.hidden} is no multiple of --heads {options.heads}")
    if options.length < 8:
        parser.error("--length must be 8 at least: two sentences and three separators")
    if options.data and not options.data.is_dir():
        parser.error(f"--data {options.data} is no folder")
    words_known = 0
    if options.data and (options.data / "vocab.txt").is_file():
        words_known = max(load_vocabulary(options.data / "vocab.txt").values()) + 1
    options.vocabulary = options.vocabulary or words_known or VOCABULARY[options.model]
    if options.vocabulary < max(SMALLEST_VOCABULARY, words_known):
        parser.error(f"--vocabulary must be {max(SMALLEST_VOCABULARY, words_known)} at least")
    return options


def steps_of(options):
    """Counts steps, at least one, until both the time and the number asked for are reached."""
    started_s, number = time.monotonic(), 0
    while number < max(1, options.steps) or time.monotonic() - started_s < options.seconds:
        yield number
        number += 1


def _positive(word):
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is not positive")
    return number


def announce_steps():
    """Announces the steps of a program that only predicts, if smaragdine is there: nobody else sees them."""
    try:
        import smaragdine
    except ImportError:
        return lambda number: None
    return lambda number: smaragdine.mark("step_end", number)
