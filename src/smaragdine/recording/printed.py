"""What a program printed: the end of its log, to say why it failed."""

from __future__ import annotations

import os
from pathlib import Path

from smaragdine.errors import visible

_TAIL_BYTES = 1 << 16
_MOST = 300  # it goes into a line of ours


def tail(log: Path) -> str:
    """The last of what was printed; nothing where there is no log."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_printed(log: Path) -> str:
    """The last line that is not blank."""
    return (lines_of(tail(log)) or [""])[-1]


def lines_of(text: str) -> list[str]:
    return [visible(line.strip()[:_MOST]) for line in text.splitlines() if line.strip()]
