"""Results of a study that never ran: a BERT, its variants and an ALBERT with energies that are known exactly.

As they stand, they agree with every claim of the paper; `Model` and `Study` have a knob for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction as F

from footprints import footprint
from smaragdine.study.results import Result

PRODUCT_W, OTHER_W = F(120), F(90)


@dataclass(frozen=True)
class Op:
    """What an operation is, told by the one who made it and not by its name."""

    part: str
    layer: int | None
    block: str | None
    product: bool
    phase: str
    name: str
    energy_j: F
    power_w: F


@dataclass(frozen=True)
class Model:
    """Energies in units of a transformer's mean forward pass."""

    layers: int = 12
    total_j: F = F(120)  # of a step, of which a tenth is idle
    weights: tuple[F, ...] = (F(64, 83), F(74, 83), F(82, 83), F(85, 83), *[F(171, 166)] * 8)
    encoder_rest: F = F(1, 10)
    embeddings: F = F(1, 100)
    pooler: F = F(1, 100)
    heads: F = F(1, 100)
    attention: tuple[F, F] = (F(4068, 10000), F(4819, 10000))  # forward, backward
    itself: tuple[F, F] = (F(7251, 10000), F(7952, 10000))
    backward: F = F(2)  # times forward
    gelu: F = F(0)
    product_w: F = PRODUCT_W
    wide_w: F = F(20)  # the feed-forward products draw so much more
    product: str = "MatMul"
    layer: str = "layer_{}"


def operations(model: Model) -> list[Op]:
    made = [*_forward_and_backward(model)]
    busy_j = model.total_j * F(9, 10)
    unit_j = busy_j / sum(op.energy_j for op in made)
    return [replace(op, energy_j=op.energy_j * unit_j) for op in made]


def _forward_and_backward(model: Model) -> Iterator[Op]:
    for part, name, energy in (
        ("embeddings", "bert/embeddings/word_embeddings/GatherV2", model.embeddings),
        ("encoder", "bert/encoder/Reshape", model.encoder_rest),
        ("pooler", "bert/pooler/dense/Tanh", model.pooler),
        ("heads", "cls/predictions/BiasAdd", model.heads),
    ):
        yield Op(part, None, None, False, "forward", name, energy, OTHER_W)
    for layer in range(model.layers):
        at = f"bert/encoder/{model.layer.format(layer)}"
        weight = model.weights[layer % len(model.weights)]
        yield Op(
            "encoder", layer, "intermediate", False, "forward", f"{at}/intermediate/Gelu", model.gelu, OTHER_W
        )
        for phase, attention, itself in zip(
            ("forward", "backward"), model.attention, model.itself, strict=True
        ):
            whole = weight * (model.backward if phase == "backward" else 1)
            for block, name, energy in _layer(attention, itself):
                # Backward, a product is two: for the input and for the weights.
                ends = [""] if phase == "forward" else [f"/{model.product}", f"/{model.product}_1"]
                more_w = model.wide_w if block in ("intermediate", "output") else 0
                for end in ends:
                    path = f"{at}/{name}/{model.product}{end}"
                    energy_j, power_w = energy * whole / len(ends), model.product_w + more_w
                    yield Op("encoder", layer, block, True, phase, path, energy_j, power_w)


def _layer(attention: F, itself: F) -> Iterator[tuple[str, str, F]]:
    for name in ("query", "key", "value"):
        yield "attention/self", f"attention/self/{name}", attention * itself / 3
    yield "attention/output", "attention/output/dense", attention * (1 - itself)
    yield "intermediate", "intermediate/dense", (1 - attention) * F(52, 100)
    yield "output", "output/dense", (1 - attention) * F(48, 100)


def result(
    made: list[Op],
    idle_j: F,
    number: int = 1,
    device: str = "gpu:0",
    provenance: str = "measured",
    hardware: str = "Quadro P5000",
    **facts: str | int,
) -> Result:
    rows = [
        {
            "device": device,
            "name": op.name,
            "phase": op.phase,
            "energy_j": float(op.energy_j),
            "busy_s": float(op.energy_j / op.power_w),
        }
        for op in made
    ]
    # The processor waits: a device of less energy that must not count.
    rows.append({"device": "cpu:9", "name": "input/next", "phase": "other", "energy_j": 0.001})
    known = {"model": "bert", "stage": "pretrain", "framework": "tf1", "precision": "fp32"} | facts
    known = {"layers": 12, "hidden": 768, "batch": 32, "length": 128} | known
    setting = "-".join(
        str(known[key]) for key in ("model", "stage", "framework", "layers", "hidden", "precision")
    )
    return Result(
        name=f"{setting}-{number}",
        setting=setting,
        number=number,
        facts=known,
        step=footprint(rows, float(idle_j), steps=10),
        steps=100,
        step_s=1.0,
        traced_steps=10,
        slower=1.1,
        duration_s=100.0,
        energy_j={device: 1000.0},
        provenance={device: provenance, "cpu:9": "estimated"},
        data="made up",
        hardware=hardware,
        asss={},
    )


def one(model: Model, number: int = 1, /, **facts: str | int) -> Result:
    return result(operations(model), model.total_j / 10, number, **facts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Study:
    """All that the paper compares, five runs of each."""

    bert: Model = field(default_factory=Model)
    finetune_j: F = F(90)
    predict_j: F = F(2000, 34)
    albert: Model = field(default_factory=lambda: Model(total_j=F(60), product_w=F(140), product="Einsum"))
    albert_noise: F = F(1, 20)  # of power, from run to run
    bert_noise: F = F(1, 100)
    # layers, hidden → of a step; → of products
    variant_j: Callable[[int, int], F] = lambda layers, hidden: F(layers * (hidden + 256))
    variant_w: Callable[[int, int], F] = lambda layers, hidden: F(hidden, 8) + layers + 40
    variant_attention: Callable[[int, int], F] = lambda layers, hidden: F(4068, 10000)
    variant_wide_w: Callable[[int, int], F] = lambda layers, hidden: F(20)
    runs: int = 5
    facts: tuple[tuple[str, str], ...] = ()


def results(study: Study, only: str = "") -> list[Result]:
    """`only`: those that one of bert, variants and albert needs."""
    facts: dict[str, str | int] = dict(study.facts)
    found: list[Result] = []
    for number in range(1, study.runs + 1):
        off = number - F(study.runs + 1, 2)
        bert = replace(study.bert, product_w=study.bert.product_w * (1 + study.bert_noise * off))
        found.append(one(bert, number, **facts))
        if only in ("", "bert"):
            found.append(one(replace(bert, total_j=study.finetune_j), number, stage="finetune", **facts))
            found.append(one(replace(bert, total_j=study.predict_j), number, stage="predict", **facts))
        if only in ("", "albert"):
            noisy_w = study.albert.product_w * (1 + study.albert_noise * off)
            found.append(one(replace(study.albert, product_w=noisy_w), number, model="albert", **facts))
        if only in ("", "variants"):
            found += [
                one(_variant(study, layers, hidden), number, layers=layers, hidden=hidden, **facts)
                for layers in (6, 12)
                for hidden in (512, 1024)
            ]
    return found


def _variant(study: Study, layers: int, hidden: int) -> Model:
    share = study.variant_attention(layers, hidden)
    return replace(
        study.bert,
        layers=layers,
        total_j=study.variant_j(layers, hidden),
        product_w=study.variant_w(layers, hidden),
        wide_w=study.variant_wide_w(layers, hidden),
        attention=(share, study.bert.attention[1] if share < F(1, 2) else share),
    )
