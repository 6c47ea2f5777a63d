"""Files that are written whole or not at all."""

import os
from pathlib import Path

import pytest

from smaragdine.errors import UserError
from smaragdine.files import users_file, write_whole


def test_a_text_replaces_what_was_there_with_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "state.json"
    elsewhere.write_text("not ours")
    path.symlink_to(elsewhere)
    mask = os.umask(0)
    try:
        write_whole(path, "ä\n")
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == ("ä\n".encode(), 0o600)
        os.umask(0o077)
        write_whole(path, "new", 0o644, durable=True)
    finally:
        os.umask(mask)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o644)
    assert elsewhere.read_text() == "not ours"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["elsewhere", "state.json"]


def test_a_text_that_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new", durable=True)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_why_arrow_cannot_write_is_told_in_the_kernels_words(tmp_path: Path) -> None:
    arrow = f"Failed to open local file '{tmp_path}/.x.csv.3'. Detail: [errno 13] Permission denied"
    with pytest.raises(UserError) as error, users_file(tmp_path / "x.csv"):
        raise OSError(arrow)
    assert str(error.value) == f"{tmp_path}/x.csv cannot be written: Permission denied"
