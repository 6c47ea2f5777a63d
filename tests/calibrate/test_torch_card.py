"""Calls that PyTorch's own profiler recorded are made again from what it recorded. On the processor: which
kernels they launch, and what those draw, only a GPU can tell (docs/calibration.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from card_files import load_card

torch = pytest.importorskip("torch")

PROGRAM = """
import torch
import torch.nn.functional as F
model = torch.nn.Sequential(
    torch.nn.Embedding(100, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 64),
    torch.nn.GELU(approximate="tanh"), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10),
)
picture = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(inplace=True),
    torch.nn.MaxPool2d(2), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 10),
)
tokens, images = torch.randint(0, 100, (4, 16)), torch.randn(4, 3, 16, 16)
optimizer = torch.optim.AdamW([*model.parameters(), *picture.parameters()], foreach=True)

def step():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(tokens).view(-1, 10)
        heads = torch.randn(2, 2, 8, 16, requires_grad=True)
        attention = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        loss = F.cross_entropy(out, torch.randint(0, 10, (64,))) + attention.float().square().mean()
        loss = loss + F.cross_entropy(picture(images), torch.randint(0, 10, (4,)))
        both = torch.cat([out.float(), out.float()], 0)
        loss = loss + torch.where(both > 0, both, 0.1 * both).softmax(-1).cumsum(0).mean()
        loss = loss + both.std() + both.amax()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
# They make views and empty tensors: no kernel is theirs.
NO_WORK = {"aten::detach_", "aten::set_", "aten::resize_", "aten::item", "aten::_local_scalar_dense"}


@pytest.fixture(scope="module")
def card() -> Any:
    made = load_card("torch_card")
    made.DEVICE = "cpu"
    return made


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One call of every operation that the program called."""
    names: dict[str, Any] = {}
    exec(PROGRAM, names)
    names["step"]()
    with torch.autograd.profiler.profile(use_kineto=True, record_shapes=True) as seen:
        names["step"]()
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    seen.export_chrome_trace(str(path))
    calls: dict[str, dict[str, Any]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "cpu_op" and event["name"].startswith("aten::"):
            args = event["args"]
            calls.setdefault(
                event["name"],
                {
                    "op": event["name"],
                    "dims": args["Input Dims"],
                    "strides": args["Input Strides"],
                    "types": args["Input type"],
                    "values": args["Concrete Inputs"],
                },
            )
    assert len(calls) > 60
    return {name: call for name, call in calls.items() if name not in NO_WORK}


def runs(variants: Iterator[Any]) -> bool:
    for _, variant in zip(range(12), variants, strict=False):
        try:
            variant.run(variant.inputs())
        except Exception:
            continue
        return True
    return False


def test_every_operation_of_a_training_is_made_again(card: Any, recorded: dict[str, dict[str, Any]]) -> None:
    failed = []
    for name, call in recorded.items():
        try:
            if not runs(card.variants(call, [])):
                failed.append(name)
        except card.CannotBeRebuilt as why:
            failed.append(f"{name}: {why}")
    assert failed == []


def test_inputs_have_the_shapes_and_types_that_were_recorded(card: Any, recorded: dict[str, Any]) -> None:
    call = recorded["aten::addmm"]
    args, named = next(card.variants(call, [])).inputs()
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    assert [list(each.shape) for each in tensors] == call["dims"][:3]
    assert [list(each.stride()) for each in tensors] == call["strides"][:3]
    assert {each.dtype for each in tensors} == {torch.bfloat16}
    assert {"beta": named["beta"], "alpha": named["alpha"]} == {"beta": 1, "alpha": 1}


def test_indices_stay_in_range(card: Any) -> None:
    call = {
        "op": "aten::embedding_dense_backward",
        "dims": [[64, 8], [64], [], [], []],
        "strides": [[8, 1], [1], [], [], []],
        "types": ["float", "long int", "Scalar", "Scalar", "Scalar"],
        "values": ["", "", "50", "-1", "False"],
    }
    (_, indices, *_), _ = next(card.variants(call, [])).inputs()
    assert 0 <= int(indices.min()) <= int(indices.max()) < 50
    assert len(indices.unique()) > 20


def test_a_long_list_is_an_optimizers(card: Any) -> None:
    """Of a list of more than some tensors Kineto keeps nothing."""
    call = {
        "op": "aten::_foreach_lerp_",
        "dims": [[], [], []],
        "strides": [[], [], []],
        "types": ["TensorList", "TensorList", "Scalar"],
        "values": ["", "", "0.1"],
    }
    lists = [[[[3, 4], [4, 1]], [[5], [1]]]]
    (first, second, weight), _ = next(card.variants(call, lists)).inputs()
    assert [list(each.shape) for each in first] == [list(each.shape) for each in second] == [[3, 4], [5]]
    assert weight == 0.1
    with pytest.raises(card.CannotBeRebuilt, match="long lists"):
        card.variants(call, [])


@pytest.mark.parametrize(
    ("op", "types", "values", "why"),
    [
        ("aten::no_such_operation", ["float"], [""], "no overload"),
        ("aten::addmm", ["float"], [""], "no overload"),
        ("mine::addmm", ["float"], [""], "no overload"),
    ],
)
def test_what_is_not_pytorchs_is_said(
    card: Any, op: str, types: list[str], values: list[str], why: str
) -> None:
    call = {"op": op, "dims": [[2]], "strides": [[1]], "types": types, "values": values}
    with pytest.raises(card.CannotBeRebuilt, match=why):
        card.variants(call, [])


def test_numbers_are_read_as_they_are_written(card: Any) -> None:
    assert card.parsed("1") == 1
    assert card.parsed("0.10000000000000001") == 0.1
    assert card.parsed("True") is True
    assert card.parsed("[1, 2, -3]") == [1, 2, -3]
    assert card.parsed("[]") == []
    assert card.parsed("[True, False]") == [True, False]
    assert card.parsed("-inf") == float("-inf")
