"""The runs that findings compare: of one framework, precision and load, on the device that does the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from smaragdine.accounting.arithmetic import average, working_device
from smaragdine.accounting.footprint import Footprint
from smaragdine.accounting.similarity import select
from smaragdine.study.results import Result
from smaragdine.study.roles import Operations, operations, over_layers
from smaragdine.study.settings import Fact
from smaragdine.study.verdicts import Claim, Finding, judge

# The paper's, § 5.1 and § 6.1
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
        """With the same operation of all transformers as one."""
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
class Group:
    suffix: str  # of its findings' keys: torch-fp32
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
        """Of the runs that are no variants: pre-trained, in most stages, most often run, then the largest."""
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
    ) -> Finding:
        """`of_power`: an estimate of power cannot speak about it."""
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


def groups(results: Sequence[Result]) -> list[Group]:
    """Runs that only measure how costs grow are left out, and so are programs of a user's own."""
    found: dict[tuple[str, str], dict[tuple[Fact, Fact], list[Result]]] = {}
    for result in sorted(results, key=lambda result: (result.setting, result.number)):
        facts = result.facts
        if {"model", "stage", "framework"} <= set(facts) and "scale" not in facts:
            kind = str(facts["framework"]), str(facts.get("precision", "fp32"))
            load = facts.get("batch", 0), facts.get("length", 0)
            found.setdefault(kind, {}).setdefault(load, []).append(result)
    made: list[Group] = []
    for kind, loads in found.items():
        # Most have the batch and length of the study: theirs is the plain name.
        for n, (load, own) in enumerate(sorted(loads.items(), key=lambda item: -len(item[1]))):
            device = _device(own)
            if device is not None:
                works = [Work(result, device) for result in own if device in result.step.devices]
                suffix = "-".join([*kind, *([f"B{load[0]}", f"N{load[1]}"] if n else [])])
                made.append(Group(suffix, device, tuple(works)))
    return made


def _device(results: Sequence[Result]) -> str | None:
    """By the devices that most runs have: one run without a GPU's power does not decide."""
    usual = Counter(frozenset(result.step.devices) for result in results).most_common(1)[0][0]
    return working_device([result.step for result in results if usual == frozenset(result.step.devices)])


def rounds(settings: Sequence[Sequence[Work]]) -> list[tuple[list[Work], ...]]:
    """As many as the setting with the fewest runs has: the first of each, the second of each, …

    Where a setting has more runs, its others are dealt out in turn: a round then has several, to be averaged.
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
