"""Files that we write whole or not at all, and JSON that anybody may have written or edited."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from smaragdine.errors import UserError, visible

_MOST_BYTES = 256 << 20
_MOST_WHOLE = 2**64  # beyond it no number of ours fits
_MOST_DIGITS = 30


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds, every number finite. Raises OSError, or ValueError for text that is not UTF-8,
    a number that is none, brackets too deep, and whatever else is wrong with it."""
    file = Path(path)
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
    return parse_json(file.read_bytes())


def parse_json(
    text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None, nan: bool = False
) -> Any:
    """Parse JSON. `pairs` makes what an object becomes. `nan`: also read Python's NaN and infinity."""
    constant = None if nan else _constant
    try:
        return json.loads(
            text, parse_float=_float, parse_int=_int, parse_constant=constant, object_pairs_hook=pairs
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _float(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word[:_MOST_DIGITS]} is beyond what a number can be")
    return value


def _int(word: str) -> int:
    if len(word) > _MOST_DIGITS or abs(value := int(word)) > _MOST_WHOLE:
        raise ValueError(f"{word[:_MOST_DIGITS]} is beyond what a number can be")
    return value


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number in JSON")


# What a program printed: the end of its log says why it failed.

_TAIL_BYTES = 1 << 16
_MOST = 300  # it goes into a line of ours


def tail(log: Path) -> str:
    """The end of what was printed; nothing where there is no log."""
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


# One process at a time works in a folder.


def locked(folder: Path) -> TextIO:
    """Lock a folder, until the file is closed or its process ends."""
    lock = open(folder / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(
            f"{folder} is at work already", remedy="Wait for it, or name another folder"
        ) from None
    return lock


# Files that are written whole or not at all.


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives the file to write, which becomes `path` when the block ends well.

    A pipe or a device is written to, never replaced, and a link stays a link.
    """
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
    """Put a file with this text in the place of what is there, file or link. Nobody else may read half of it.

    Where this raises OSError, the old file stands. `durable`: the new one outlives a power cut.
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
    """As `whole_file`, but a failure is one line that tells the user."""
    try:
        with whole_file(path) as part:
            yield part
    except OSError as error:
        raise UserError(f"{path} cannot be written", _why(error)) from None


def _why(error: OSError) -> str:
    """Why it failed, without the part file and the errno that Arrow adds."""
    why = error.strerror or str(error)
    return re.sub(r"^.*Detail: \[errno \d+\] ", "", why, flags=re.DOTALL)
