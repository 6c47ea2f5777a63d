"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from smaragdine.errors import UserError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what becomes `path` when the block ends well. A pipe or a device is written to, never
    replaced, and a link stays a link."""
    if path.exists() and not path.is_file():
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        yield path
        return
    target = Path(os.path.realpath(path))
    for folder in (path.parent, target.parent):
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {folder}")
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield part
        os.replace(part, target)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


@contextlib.contextmanager
def users_file(path: Path) -> Iterator[Path]:
    """The same, where a failure is the user's to mend: one line."""
    try:
        with whole_file(path) as part:
            yield part
    except OSError as error:
        raise UserError(f"{path} cannot be written", error.strerror or str(error)) from None
