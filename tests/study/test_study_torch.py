"""The study's program in PyTorch."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest

from cli import smaragdine
from smaragdine.accounting.run import Run

STUDY = Path(__file__).parents[2] / "experiments" / "study"
sys.path.insert(0, str(STUDY))

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "transformers")),
    reason="needs PyTorch and transformers",
)

SIZE = {"layers": 2, "hidden": 32, "batch": 4, "length": 16, "vocabulary": 200, "seconds": 0}
TINY = [word for name, value in SIZE.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def torch_bert():
    import torch
    import torch_bert

    # So small a model is faster so, and its losses are the same every time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch_bert
    torch.set_num_threads(threads)


@pytest.mark.parametrize("model", ["bert", "albert"])
@pytest.mark.parametrize("stage", ["pretrain", "finetune", "predict"])
def test_every_stage_runs(torch_bert, model, stage, capsys):
    torch_bert.main([*TINY, "--model", model, "--stage", stage, "--steps", "2", "--precision", "bf16"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["data", "model", "steps"]
    head = "PreTraining" if stage == "pretrain" else "SequenceClassification"
    assert lines[1].startswith(f"model: {model.title()}For{head}, ")
    assert lines[2].startswith("steps: 2, ")
    assert math.isfinite(float(lines[2].split()[-1]))


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_there_is_something_to_learn(torch_bert, stage, capsys):
    def loss(steps):
        more = ["--batch", "16", "--length", "32", "--rate", "1e-2", "--steps", str(steps)]
        torch_bert.main([*TINY, "--stage", stage, *more])
        return float(capsys.readouterr().out.split()[-1])

    # The 32 batches go round: both losses are of the first one.
    assert loss(torch_bert.BATCHES + 1) < loss(1) - 0.3


@pytest.mark.parametrize(
    ("model", "inner", "size"), [("bert", "bert", 109_482_240), ("albert", "albert", 11_683_584)]
)
def test_base_models_are_of_the_published_size(torch_bert, model, inner, size):
    import torch
    from options import options_of

    with torch.device("meta"):
        made = torch_bert.model_of(options_of("", ["--model", model]))
    assert sum(parameter.numel() for parameter in getattr(made, inner).parameters()) == size
    assert made.config._attn_implementation == "eager"


def test_prediction_has_steps_and_names(tmp_path):
    """Without an optimizer it announces its steps itself."""
    done = smaragdine(
        *("run", "-o", "out", "--trace-steps", "3", "--trace-skip", "2", STUDY / "torch_bert.py", *TINY),
        *("--model", "albert", "--stage", "predict", "--steps", "12"),
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = Run.open(tmp_path / "out")
    assert found.steps is not None
    assert found.step is not None
    assert (found.steps.count, len(found.steps.traced_ns)) == (12, 3)
    rows = found.step.rows.to_pylist()
    layer = "AlbertForSequenceClassification/albert/encoder/albert_layer_groups/0/albert_layers/0"
    names = {(row["name"], row["phase"]): row["count"] for row in rows}
    # One layer's weights, used twice.
    assert names[f"{layer}/attention/query/addmm", "forward"] == 2
    assert (
        names["AlbertForSequenceClassification/albert/encoder/embedding_hidden_mapping_in/addmm", "forward"]
        == 1
    )
    assert {row["phase"] for row in rows} <= {"forward", "other"}
