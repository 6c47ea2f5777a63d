"""Writes files and folders whole or not at all, and never over what is there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from smaragdine.errors import UserError
from smaragdine.files import users_file


@contextlib.contextmanager
def new_file(path: Path, force: bool = False) -> Iterator[Path]:
    """Gives a place to write, which becomes `path` if the block ends well; pipes are written directly."""
    if path.is_dir():
        raise UserError(f"{path} is a folder", remedy="Name a file")
    if not path.exists() or path.is_file():
        _refuse_taken(path, force)
    with users_file(path) as part:
        yield part


@contextlib.contextmanager
def new_folder(path: Path, force: bool = False, owned: Iterable[str] = ()) -> Iterator[Path]:
    """Gives a folder for files, which becomes `path` if the block ends well.

    With `force` the files go into a folder that has files. They replace all files whose names match `owned`:
    tables of two recordings must not stand side by side.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file", remedy="Name a folder with -o DIR")
    if path.is_dir() and any(path.iterdir()):
        _refuse_taken(path, force)
    with _one_line(path):
        target = Path(os.path.realpath(path))
        part = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            part.mkdir()
            yield part
            target.mkdir(exist_ok=True)
            for name in owned:
                (target / name).unlink(missing_ok=True)
            for file in part.iterdir():
                os.replace(file, target / file.name)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _refuse_taken(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise UserError(f"{path} exists", remedy="Name another with -o, or write over it with --force")


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        missing = not path.parent.is_dir()
        why = f"there is no folder {path.parent}" if missing else error.strerror or str(error)
        raise UserError(f"{path} cannot be written", why) from None
