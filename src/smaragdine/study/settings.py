"""What a study runs: a program with its words, and the facts by which its runs are told apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Fact = str | int | float
PROGRAM = "program"  # the fact that tells a user's own program
SCRIPT = "script"  # and the one of what is in its file
STAGES = {"pretrain": "pre-training", "finetune": "fine-tuning", "predict": "prediction"}


@dataclass(frozen=True)
class Setting:
    """Runs of the same setting repeat each other."""

    name: str  # of its runs: bert-pretrain-torch-L12-H768-fp32
    words: tuple[str, ...]  # the program, as `smaragdine run` takes it
    # model, stage, framework, layers, hidden, batch, length, precision; of a user's own program what varies
    facts: Mapping[str, Fact] = field(default_factory=dict[str, Fact])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    trace_steps: int = 20
    trace_skip: int = 10


@dataclass(frozen=True)
class Run:
    setting: Setting
    number: int  # from 1

    @property
    def name(self) -> str:
        return f"{self.setting.name}-{self.number}"
