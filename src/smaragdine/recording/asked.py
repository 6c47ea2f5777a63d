"""What a recording was asked for when it began. It is in run.json, so that nobody has to guess later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

BASELINE = "baseline"  # the verb that records the idle machine


@dataclass(frozen=True)
class TraceAsked:
    """What to trace. `steps` and `skip` as in `run --trace-steps` and `--trace-skip`."""

    on: bool
    steps: int = 0
    skip: int = 0
    budget: float | None = None  # the part of the time that tracing may cost; None: any
    quiet_s: float = 0.0  # after so long without a step, we take a program to have none

    def to_json(self) -> dict[str, Any]:
        if not self.on:
            return {"mode": "off"}
        return {
            "mode": "auto",
            "steps": self.steps,
            "skip": self.skip,
            "budget": self.budget,
            "quiet_s": self.quiet_s,
        }


UNTRACED = TraceAsked(on=False)


def asked(verb: str, trace: TraceAsked = UNTRACED, **more: Any) -> dict[str, Any]:
    return {"verb": verb, "trace": trace.to_json(), **more}


def verb_of(info: Mapping[str, Any]) -> str | None:
    """Which verb made a recording; None where the recording does not say."""
    verb = _asked(info).get("verb")
    return verb if isinstance(verb, str) else None


def trace_of(info: Mapping[str, Any]) -> TraceAsked | None:
    """What was to be traced; None where the recording does not say, or in a way we do not know."""
    trace = _dict(_asked(info).get("trace"))
    if trace.get("mode") == "off":
        return UNTRACED
    steps, skip, quiet_s = (_number(trace.get(name)) for name in ("steps", "skip", "quiet_s"))
    if trace.get("mode") != "auto" or steps is None or skip is None or quiet_s is None:
        return None
    return TraceAsked(True, int(steps), int(skip), _number(trace.get("budget")), quiet_s)


def _asked(info: Mapping[str, Any]) -> dict[str, Any]:
    return _dict(info.get("asked"))


def _dict(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value < math.inf else None
