"""What one run is set to before it begins: limits, parameters, and how cool its devices must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta, Struct

Value = str | int | float | bool
Seconds = Annotated[float, Meta(gt=0, le=1e7)]
LimitKind = Literal["power", "clock", "parameter"]


@dataclass(frozen=True)
class Setting:
    """What a sweep varies. It leaves alone what is None or {}."""

    limit_kind: LimitKind
    power_limit_w: float | None = None
    memory_clock_mhz: float | None = None
    graphics_clock_mhz: float | None = None
    parameters: Mapping[str, Value] = field(default_factory=dict[str, Value])
    gpu_type: str | None = None  # of the node it runs on

    def __str__(self) -> str:
        """`150 W`, `877/1005 MHz`, `batch 16`."""
        words = [f"{self.power_limit_w:g} W"] if self.power_limit_w is not None else []
        if self.graphics_clock_mhz is not None:
            words.append(f"{self.memory_clock_mhz:g}/{self.graphics_clock_mhz:g} MHz")
        words += [f"{name} {value}" for name, value in self.parameters.items()]
        return ", ".join([*words, *([self.gpu_type] if self.gpu_type else [])])


class CoolDown(Struct, frozen=True, forbid_unknown_fields=True):
    """Wait before each repetition until every device is this cool, but not longer than the time-out."""

    temperature_c: Annotated[float, Meta(gt=0, le=150)]
    timeout_s: Seconds = 600.0
