"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
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


def write_whole(path: Path, text: str, mode: int = 0o600, *, durable: bool = False) -> None:
    """Put this text in the place of what was there, link or file. Until it is whole nobody else may read it.

    Raises OSError, and then what was there stands. `durable`: it outlives a power cut.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")  # threads may write at once
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(fd, mode)
            if durable:
                os.fsync(fd)
        os.replace(part, path)
    except BaseException:
        part.unlink()
        raise


@contextlib.contextmanager
def users_file(path: Path) -> Iterator[Path]:
    """The same, where a failure is the user's to mend: one line."""
    try:
        with whole_file(path) as part:
            yield part
    except OSError as error:
        raise UserError(f"{path} cannot be written", _why(error)) from None


def _why(error: OSError) -> str:
    """Arrow names the part file and the kernel's number besides."""
    why = error.strerror or str(error)
    return re.sub(r"^.*Detail: \[errno \d+\] ", "", why, flags=re.DOTALL)
