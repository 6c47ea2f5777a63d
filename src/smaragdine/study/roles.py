"""Tells what an operation is to a transformer model, from its qualified name: part, layer, block and kind.

BertForPreTraining/bert/encoder/layer/3/attention/self/query/addmm   encoder, 3, attention/self, product
bert/encoder/layer_3/output/dense/MatMul/MatMul_1                    encoder, 3, output, product
AlbertForPreTraining/albert/encoder/albert_layer_groups/0/albert_layers/0/ffn/addmm
                                                                     encoder, –, intermediate, product
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Literal

import numpy as np
import numpy.typing as npt

from smaragdine.accounting.arithmetic import average, working_device
from smaragdine.accounting.footprint import Footprint, column
from smaragdine.accounting.merge import MergeRule, merge
from smaragdine.accounting.similarity import select
from smaragdine.arrays import Floats
from smaragdine.study.claims import Claim, JudgedClaim, judge
from smaragdine.study.plan import Fact
from smaragdine.study.results import Result

Part = Literal["embeddings", "encoder", "pooler", "heads", "optimizer", "other"]
Block = Literal["attention/self", "attention/output", "intermediate", "output"]
Kind = Literal["product", "einsum", "other"]  # an einsum is a matrix product by another name

Mask = npt.NDArray[np.bool_]

_PARTS: dict[str, Part] = {
    "embeddings": "embeddings",
    "encoder": "encoder",
    "pooler": "pooler",
    "pooler_activation": "pooler",
}
# What tracing calls work that has no place in the model; see docs/tracing.md.
_CLASSES: dict[str, Part] = {
    **dict.fromkeys(("program", "framework", "input", "unplaced"), "other"),
    "optimizer": "optimizer",
}
_HEADS = frozenset({"cls", "predictions", "seq_relationship", "sop_classifier", "classifier", "loss"})
_MODELS = frozenset({"bert", "albert"})
_NUMBER = re.compile(r"_(?:\d+|\*(?:~\d+)?)$")  # attention_1, layer_*
_LAYER = re.compile(r"layer_(\d+)")
# Hugging Face's ALBERT has the dense layer and the norm after attention in `attention` itself.
_AFTER_ATTENTION = frozenset({"output", "dense", "LayerNorm", "output_dropout"})
_BLOCKS: dict[str, Block] = {
    "intermediate": "intermediate",
    "ffn": "intermediate",
    "activation": "intermediate",
    "output": "output",
    "ffn_output": "output",
    "full_layer_layer_norm": "output",
}
_EINSUM = re.compile(r"(?:xla)?einsum", re.IGNORECASE)
_PRODUCT = re.compile(
    r"_?(?:scaled_)?(?:mm|addmm|bmm|baddbmm|addbmm)(?:_activation)?|(?:mkldnn_|_mkl_)?linear(?:_backward)?"
    r"|(?:fused|sparse|_mkl)?(?:batch)?matmul(?:v\d)?|tensordot|dot|dot_general|xladot(?:v2)?"
    r"|fold\w+_(?:batch)?matmul(?:v\d)?"  # TensorFlow's rewriter: a transpose into a product
    r"|_?scaled_dot_product_\w+|_(?:flash|efficient)_attention_\w+",
    re.IGNORECASE,
)
# Merges a transformer with the others even if it has one operation more, or if there are no others.
LAYERS = (MergeRule(re.compile(r"layer_\d+"), "layer_*"), MergeRule(re.compile(r"\d+"), "*"))


@dataclass(frozen=True)
class Role:
    part: Part
    layer: int | None  # None: no layer, ALBERT's shared one, or merged
    block: Block | None  # its block of a transformer
    operation: str
    kind: Kind


@dataclass(frozen=True)
class Operations:
    """The rows of one device as columns, with their roles."""

    name: tuple[str, ...]
    phase: npt.NDArray[np.object_]
    energy_j: Floats
    busy_s: Floats
    part: npt.NDArray[np.object_]
    layer: npt.NDArray[np.int64]  # -1: no layer
    block: npt.NDArray[np.object_]
    kind: npt.NDArray[np.object_]

    @property
    def product(self) -> Mask:
        return self.kind != "other"

    @property
    def attention(self) -> Mask:
        return (self.block == "attention/self") | (self.block == "attention/output")

    def of(self, phase: str) -> Mask:
        return self.phase == phase

    def sum_j(self, chosen: Mask) -> float:
        return float(self.energy_j[chosen].sum())

    def top(self, n: int) -> npt.NDArray[np.int64]:
        """Most energy first; ties in the order of rows, which is always the same."""
        return np.argsort(-self.energy_j, kind="stable")[:n]


def over_layers(footprint: Footprint) -> Footprint:
    """The summary footprint of a transformer model: an operation that all transformers share is one row."""
    return merge(footprint, LAYERS)


@lru_cache(maxsize=1 << 16)
def role_of(name: str) -> Role:
    segments = name.split("/")
    operation = segments[-1]
    part, inside = _part(segments)
    layer = _layer(inside) if part == "encoder" else None
    block = _block(inside) if part == "encoder" else None
    return Role(part, layer, block, operation, _kind(segments))


def operations(footprint: Footprint, device: str) -> Operations:
    """Names repeat over phases and runs, so each is looked at once."""
    rows = footprint.device_rows(device)
    names: list[str] = rows["name"].to_pylist()
    phases: list[str | None] = rows["phase"].to_pylist()
    roles = [role_of(name) for name in names]
    # A framework may put the optimizer's work into a layer's scope; the phase knows better.
    updates = [phase == "optimizer" for phase in phases]
    parts = ["optimizer" if update else role.part for role, update in zip(roles, updates, strict=True)]
    return Operations(
        name=tuple(names),
        phase=_objects(phases),
        energy_j=column(rows, "energy_j"),
        busy_s=column(rows, "busy_s"),
        part=_objects(parts),
        layer=np.array([-1 if role.layer is None else role.layer for role in roles], dtype=np.int64),
        block=_objects([role.block for role in roles]),
        kind=_objects([role.kind for role in roles]),
    )


def _part(segments: Sequence[str]) -> tuple[Part, Sequence[str]]:
    """The part, and the segments inside of it."""
    if segments[0] in _CLASSES:
        return _CLASSES[segments[0]], ()
    for i, segment in enumerate(segments[:-1]):
        part = _PARTS.get(segment)
        if part is not None:
            return part, segments[i + 1 :]
    scopes = segments[:-1]
    if any(scope in _HEADS for scope in scopes):
        return "heads", ()
    # In the model but in no part of it (the attention mask), or in no scope at all; else the loss beside it.
    nowhere = not scopes or any(scope in _MODELS for scope in scopes)
    return "other" if nowhere else "heads", ()


def _layer(inside: Sequence[str]) -> int | None:
    for segment, following in zip_longest(inside, inside[1:], fillvalue=""):
        match = _LAYER.fullmatch(segment)
        if match:
            return int(match[1])
        if segment == "layer" and following.isdecimal():
            return int(following)
    return None


def _block(inside: Sequence[str]) -> Block | None:
    """The outermost scope that is a block; the operation itself is no scope."""
    scopes = [_NUMBER.sub("", segment) for segment in inside[:-1]]
    for scope, following in zip_longest(scopes, scopes[1:], fillvalue=""):
        if scope == "attention":
            return "attention/output" if following in _AFTER_ATTENTION else "attention/self"
        if scope == "intermediate" and following == "output":  # ALBERT's reference implementation nests them
            return "output"
        if scope == "ffn" and following == "intermediate":
            continue
        if scope in _BLOCKS:
            return _BLOCKS[scope]
    return None


def _kind(segments: Sequence[str]) -> Kind:
    operation = _NUMBER.sub("", segments[-1])
    if _EINSUM.fullmatch(operation):
        return "einsum"
    if not _PRODUCT.fullmatch(operation):
        return "other"
    # An einsum's parts are in its scope.
    above = [_NUMBER.sub("", scope) for scope in segments[-3:-1]]
    return "einsum" if any(map(_EINSUM.fullmatch, above)) else "product"


def _objects(values: Sequence[object]) -> npt.NDArray[np.object_]:
    made = np.empty(len(values), dtype=np.object_)
    made[:] = values
    return made


# The runs that findings compare: of one framework, precision and load, on the device that does the work.

# The paper's model, § 5.1 and § 6.1.
PAPER = {"layers": 12, "hidden": 768, "batch": 32, "length": 128}
Shape = tuple[int, int]  # layers, hidden


@dataclass(frozen=True)
class Work:
    """One run's step on the working device."""

    result: Result
    device: str

    @cached_property
    def operations(self) -> Operations:
        return operations(self.result.step, self.device)

    @cached_property
    def summary(self) -> Footprint:
        return over_layers(select(self.result.step, self.device))

    @cached_property
    def summed(self) -> Operations:
        """With operations that all transformers share as one."""
        return operations(self.summary, self.device)

    @property
    def total_j(self) -> float:
        """Of a step, idle included."""
        return self.result.step.devices[self.device].total_j

    @property
    def estimated(self) -> bool:
        of_step = self.result.step.devices[self.device].provenance
        return "estimated" in (self.result.provenance.get(self.device) or of_step or "")

    @property
    def shape(self) -> Shape:
        return shape_of(self.result)


def shape_of(result: Result) -> Shape:
    return int(result.facts.get("layers", 0)), int(result.facts.get("hidden", 0))


@dataclass(frozen=True)
class OperationGroup:
    suffix: str  # ends its findings' keys: torch-fp32
    device: str
    works: tuple[Work, ...]

    def of(self, model: str, stage: str, shape: Shape | None = None) -> list[Work]:
        return [
            work
            for work in self.works
            if (work.result.facts.get("model"), work.result.facts.get("stage")) == (model, stage)
            and shape in (None, work.shape)
        ]

    def main_shape(self, model: str) -> Shape | None:
        """The shape that is no variant: pre-trained, in most stages, most often run, then the largest."""
        stages: dict[Shape, list[str]] = {}
        for work in self.works:
            if work.result.facts.get("model") == model:
                stages.setdefault(work.shape, []).append(str(work.result.facts["stage"]))

        def weight(shape: Shape) -> tuple[bool, int, int, Shape]:
            own = stages[shape]
            return "pretrain" in own, len(set(own)), len(own), shape

        return max(stages, key=weight, default=None)

    def main(self, model: str, stage: str) -> list[Work]:
        shape = self.main_shape(model)
        return self.of(model, stage, shape) if shape else []

    def finding(
        self,
        claim: Claim,
        works: Sequence[Work],
        values: Sequence[float],
        also: str = "",
        obstacle: str = "",
        of_power: bool = False,
    ) -> JudgedClaim:
        """`of_power`: estimated power says nothing about it."""
        estimated = any(work.estimated for work in works)
        remarks = [text for text in (_unlike(works) if claim.study != "variants" else "",) if text]
        if estimated and of_power:
            obstacle = obstacle or f"power of {self.device} is estimated: that cannot tell operations apart"
        elif estimated:
            remarks.append(f"power of {self.device} is estimated: this says little more than time")
        also = "; ".join(text for text in (also, "estimated" if estimated and values else "") if text)
        machines = sorted({work.result.hardware for work in works})
        if len(machines) > 1:
            remarks.append(f"runs of several machines: {'; '.join(machines)}")
        elif len(cards := {work.result.cards for work in works if work.result.cards}) > 1:
            remarks.append(f"runs of {len(cards)} cards of one kind, which need not draw the same")
        settings = [work.result.setting for work in works]
        return judge(claim, values, self.suffix, settings, also, remarks, obstacle)


def groups(results: Sequence[Result]) -> list[OperationGroup]:
    """Leaves out runs that only measure how costs grow, and users' own programs."""
    found: dict[tuple[str, str], dict[tuple[Fact, Fact], list[Result]]] = {}
    for result in sorted(results, key=lambda result: (result.setting, result.number)):
        facts = result.facts
        if {"model", "stage", "framework"} <= set(facts) and "scale" not in facts:
            kind = str(facts["framework"]), str(facts.get("precision", "fp32"))
            load = facts.get("batch", 0), facts.get("length", 0)
            found.setdefault(kind, {}).setdefault(load, []).append(result)
    made: list[OperationGroup] = []
    for kind, loads in found.items():
        # Most runs have the study's own batch and length: they get the plain name.
        for n, (load, own) in enumerate(sorted(loads.items(), key=lambda item: -len(item[1]))):
            device = _device(own)
            if device is not None:
                works = [Work(result, device) for result in own if device in result.step.devices]
                suffix = "-".join([*kind, *([f"B{load[0]}", f"N{load[1]}"] if n else [])])
                made.append(OperationGroup(suffix, device, tuple(works)))
    return made


def _device(results: Sequence[Result]) -> str | None:
    """By the devices that most runs have, so that one run without a GPU's power does not decide."""
    usual = Counter(frozenset(result.step.devices) for result in results).most_common(1)[0][0]
    return working_device([result.step for result in results if usual == frozenset(result.step.devices)])


def rounds(settings: Sequence[Sequence[Work]]) -> list[tuple[list[Work], ...]]:
    """As many rounds as the setting with the fewest runs has: the first of each, the second of each, …

    If a setting has more runs, the others are dealt out in turn; then a round has several, which are
    averaged.
    """
    count = min(map(len, settings), default=0)
    return [tuple([*works[n::count]] for works in settings) for n in range(count)]


def summary_of(works: Sequence[Work]) -> Footprint:
    """The mean of a round's runs of one setting."""
    return works[0].summary if len(works) == 1 else average([work.summary for work in works]).mean


def _unlike(works: Sequence[Work]) -> str:
    """How the model differs from the paper's."""
    facts = works[0].result.facts if works else {}
    unlike = [key for key, there in PAPER.items() if facts.get(key, there) != there]
    return ", ".join(f"{key} {facts[key]} ({PAPER[key]} there)" for key in unlike)
