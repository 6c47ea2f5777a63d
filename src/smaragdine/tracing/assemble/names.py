"""A qualified name with its phase, and the classes of work that has no place in the model."""

from __future__ import annotations

import re
from dataclasses import dataclass

from smaragdine.tracing.assemble.coverage import FRAMEWORK, UNPLACED

_INSTANCE = re.compile(r"[.]\d+$")


@dataclass(frozen=True)
class Name:
    path: str
    phase: str  # forward | backward | optimizer | other


def framework_name(operation: str) -> Name:
    """Work that belongs to no line of the program, by kind: `copy.12` is a copy."""
    return Name(f"{FRAMEWORK}/{_INSTANCE.sub('', operation)}", "other")


def unplaced_name(operation: str) -> Name:
    return Name(f"{UNPLACED}/{_INSTANCE.sub('', operation)}", "other")
