"""The study's BERT and ALBERT in Keras on TensorFlow, and its BERT as a graph of TensorFlow 1, traced.

What is expected is counted here, by the papers, not taken from the programs.
"""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli import SMARAGDINE, environment, write_script
from smaragdine.recording.reader import open_recording

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("keras", "tensorflow")),
    reason="needs Keras and TensorFlow",
)

PROGRAMS = Path(__file__).parents[2] / "experiments" / "study"
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow"}
LAYERS = 2
SIZE = {"layers": LAYERS, "hidden": 32, "heads": 2, "batch": 4, "length": 16, "vocabulary": 200}
TINY = [word for name, value in SIZE.items() for word in (f"--{name}", str(value))]
STEPS = 129  # the 32 batches go round four times: the first and the last step have the same one
TRAIN = [*TINY, "--seconds", "0", "--rate", "3e-3"]
TRACED = 4
PRODUCT = re.compile(r"(?:Fold\w+_)?(?:Fused)?(?:Batch)?MatMul(?:V2)?(?:_\d+)?")
EINSUM = re.compile(r"Einsum(?:_\d+)?")

# Keras starts once. BERT's last steps are traced and ALBERT's first ones.
KERAS = """
import sys
sys.path.insert(0, sys.argv[1])
import keras, keras_bert, keras_models

for model, words in (("bert", 30522), ("albert", 30000)):
    shape = keras_models.Shape(model, 12, 768, 12, 128, words)
    # Nothing of that size is ever made.
    with keras.StatelessScope(initialize_variables=False):
        made = keras_models.model_of(shape, "pretrain")
    print("size:", model, *(made.get_layer(name).count_params() for name in ("bert", "cls")))
for model in ("bert", "albert"):
    keras_bert.main([*sys.argv[2:], "--model", model])
import tf1_bert
try:
    tf1_bert.main(["--model", "albert"])
except SystemExit as refused:
    print("refused:", refused)
"""


@dataclass(frozen=True)
class Done:
    said: list[str]
    events: list[dict[str, Any]]


@pytest.fixture(scope="module")
def keras_run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("keras")
    program = write_script(folder / "both.py", KERAS)
    # The first step compiles, and is not counted.
    words = [str(PROGRAMS), *TRAIN, "--steps", str(STEPS - 1)]
    return run(folder, STEPS - TRACED, 2 * TRACED, program, *words)


@pytest.fixture(scope="module")
def session_run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("session")
    return run(folder, 3, TRACED, PROGRAMS / "tf1_bert.py", *TRAIN, "--steps", str(STEPS))


def run(folder: Path, skip: int, traced: int, program: Path, *words: str) -> Done:
    options = ("-o", "out", "--trace-steps", str(traced), "--trace-skip", str(skip))
    done = subprocess.run(
        [*SMARAGDINE, "run", *options, program, *words],
        env=environment(ENVIRONMENT),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Done(done.stdout.splitlines(), open_recording(folder / "out").events.to_pylist())


def test_base_models_are_of_the_published_size(keras_run: Done) -> None:
    said = [line.split()[1:] for line in keras_run.said if line.startswith("size: ")]
    hidden, relation = 768, 768 * 2 + 2

    def words(width: int, vocabulary: int) -> int:
        """The table counts: a product by it is what they are found with."""
        return hidden * width + width + 2 * width + vocabulary + vocabulary * width

    assert {model: (int(bert), int(heads)) for model, bert, heads in said} == {
        "bert": (109_482_240, words(hidden, 30522) + relation),
        "albert": (11_683_584, words(128, 30000) + relation),
    }


def test_keras_learns(keras_run: Done) -> None:
    learned(keras_run, 2)


def test_the_session_learns(session_run: Done) -> None:
    learned(session_run, 1)


def learned(done: Done, models: int) -> None:
    assert sum(line.startswith("data: generated text") for line in done.said) == models
    said = [re.fullmatch(r"steps: (\d+), loss: (\S+) at first, (\S+) at last", line) for line in done.said]
    losses = [(int(each[1]), float(each[2]), float(each[3])) for each in said if each]
    assert len(losses) == models
    for steps, first, last in losses:
        assert steps == STEPS
        # Nothing is known at first: a word is one of 200, and a sentence follows or it does not.
        assert first == pytest.approx(math.log(200) + math.log(2), abs=0.5)
        assert last < 0.95 * first


def scopes(model: str) -> Iterator[tuple[str, int]]:
    """Where matrices are multiplied going forward, and how often."""
    for number in range(LAYERS):
        layer = f"bert/encoder/layer_{number}"
        for name in ("attention/self/query", "attention/self/key", "attention/self/value"):
            yield f"{layer}/{name}", 1
        if model == "albert":
            yield f"{layer}/attention/self/scores", 1
            yield f"{layer}/attention/self/context", 1
        else:
            yield f"{layer}/attention/self", 2
        for name in ("attention/output/dense", "intermediate/dense", "output/dense"):
            yield f"{layer}/{name}", 1


def heads(decoder: str) -> Iterator[tuple[str, int]]:
    for name in ("bert/pooler/dense", "cls/predictions/transform/dense", decoder, "cls/seq_relationship"):
        yield name, 1


def expected(found: Iterator[tuple[str, int]], steps: int) -> Counter[tuple[str, str]]:
    """A product of two things that are both learned has two in its backward pass."""
    times = Counter[tuple[str, str]]()
    for scope, count in found:
        times[scope, "forward"] = steps * count
        times[scope, "backward"] = steps * 2 * count
    return times


def products(done: Done, pattern: re.Pattern[str], known: set[str]) -> Counter[tuple[str, str]]:
    """By the innermost scope that is known."""
    times = Counter[tuple[str, str]]()
    for event in done.events:
        *above, operation = event["name"].split("/")
        if pattern.fullmatch(operation):
            inside = ["/".join(above[:length]) for length in range(len(above), 0, -1)]
            times[next((each for each in inside if each in known), event["name"]), event["phase"]] += 1
    return times


def test_bert_in_keras_multiplies_in_the_scopes_of_the_paper(keras_run: Done) -> None:
    want = expected(scopes("bert"), TRACED) + expected(heads("cls/predictions/decoder"), 2 * TRACED)
    assert products(keras_run, PRODUCT, {scope for scope, _ in want}) == want


def test_albert_sums_over_indices_and_has_the_same_weights_in_every_layer(keras_run: Done) -> None:
    mapping = ("bert/encoder/embedding_hidden_mapping_in", 1)
    want = expected(iter([mapping, *scopes("albert")]), TRACED)
    assert products(keras_run, EINSUM, {scope for scope, _ in want}) == want


def test_the_session_multiplies_in_the_scopes_of_the_paper(session_run: Done) -> None:
    want = expected(iter([*scopes("bert"), *heads("cls/predictions")]), TRACED)
    assert products(session_run, PRODUCT, {scope for scope, _ in want}) == want


def test_phases_are_apart(keras_run: Done, session_run: Done) -> None:
    for done in (keras_run, session_run):
        roots = {
            phase: {event["name"].split("/")[0] for event in done.events if event["phase"] == phase}
            for phase in ("forward", "backward", "optimizer")
        }
        for phase in ("forward", "backward"):
            assert roots[phase] - {"program", "framework"} == {"bert", "cls"}, phase
        assert roots["optimizer"] == {"optimizer"}


def test_the_session_has_no_albert(keras_run: Done) -> None:
    assert keras_run.said[-1] == "refused: tf1_bert.py has BERT alone: keras_bert.py has ALBERT"
