"""What outlives the daemon's process, as JSON files in the state folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smaragdine.whole import write_whole


class StateFile:
    """One file. Written at once or not at all; where that fails it is said, once."""

    def __init__(self, folder: Path | None, name: str, say: Callable[[str], None]) -> None:
        self._path = folder / name if folder is not None else None
        self._say = say
        self._failed = False

    def save(self, value: Any) -> None:
        if self._path is None:
            return
        try:
            write_whole(self._path, json.dumps(value))
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._say(f"{self._path} cannot be written, so a restart would lose it: {error.strerror}")
            self._failed = True

    def load(self, use: Callable[[Any], None]) -> bool:
        """Hand what is there to `use`; whether that went well."""
        if self._path is None:
            return False
        try:
            use(json.loads(self._path.read_text()))
            return True
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            self._say(f"{self._path} cannot be used and is ignored: {type(error).__name__}: {error}")
            return False
