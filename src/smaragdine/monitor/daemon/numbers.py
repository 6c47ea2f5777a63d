"""Channel numbers: the same for the same channel over restarts, and never given to another one."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from smaragdine.sensors.base import Channel
from smaragdine.whole import write_whole

_FILE = "channels.json"


def machine_numbers(channels: Sequence[Channel], folder: Path | None, next_number: int) -> list[int]:
    """A number for each channel of the machine: the one it had, else a new one from `next_number` on.

    Numbers in a spool or in a reader's hands stay right when a restarted daemon finds other sensors.
    """
    known = _load(folder)
    seen: Counter[str] = Counter()
    numbers: list[int] = []
    next_number = max([next_number, *(number + 1 for number in known.values())])
    for channel in channels:
        # Details are worded anew at each start; several of one name (dies of a package) come in order.
        name = f"{channel.sensor} {channel.name}"
        key = f"{name} {seen[name]}"
        seen[name] += 1
        if key not in known:
            known[key] = next_number
            next_number += 1
        numbers.append(known[key])
    _save(folder, known)
    return numbers


def _load(folder: Path | None) -> dict[str, int]:
    if folder is None:
        return {}
    try:
        values = json.loads((folder / _FILE).read_text())
        return {str(key): int(number) for key, number in values.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _save(folder: Path | None, known: dict[str, int]) -> None:
    if folder is None:
        return
    # Where it cannot be written nothing is spooled either, and a restart begins anew.
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(folder / _FILE, json.dumps(known))
