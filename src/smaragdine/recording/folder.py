"""A recording's folder: we make it fresh, never over other data, and write run.json whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smaragdine.clock import ClockPair
from smaragdine.errors import UserError
from smaragdine.recording.damage import is_as_written, sealed_json
from smaragdine.recording.format import FORMAT_VERSION, INFO_FILE, SPOOL_FOLDER
from smaragdine.recording.seal import last_seals
from smaragdine.system import boot_id, start_ticks
from smaragdine.version import __version__

# All that we store of the environment: what decides how fast or where the program computes. Never more, so
# that no secret ends up in a recording.
STORED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "KERAS_BACKEND",
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "TF_XLA_FLAGS",
    "TF_ENABLE_ONEDNN_OPTS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "WORLD_SIZE",
    "SLURM_JOB_ID",
)


def create(folder: Path | None, label: str, root: Path = Path("runs")) -> Path:
    """Make the folder of a new recording: the named one if it is free, else `runs/<date>-<label>`."""
    if folder is not None:
        _refuse_unreadable(folder)
        _refuse_taken(folder)
        _mkdir(folder)
        _claim(folder)
        return folder
    label = re.sub(r"[^\w.-]+", "-", label).strip("-") or "run"
    name = f"{time.strftime('%Y-%m-%d')}-{label}"
    _mkdir(root)
    for number in range(1, 100_000):
        candidate = root / (name if number == 1 else f"{name}-{number}")
        try:
            candidate.mkdir()  # atomic, so that two runs that start together get two folders
        except FileExistsError:
            continue
        except OSError as error:
            raise _cannot_create(candidate, error) from None
        _claim(candidate)
        return candidate
    raise UserError(f"{root} is full of recordings named {name}", remedy="Name another folder (-o DIR)")


def _refuse_unreadable(folder: Path) -> None:
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        # Arrow could not open files in it.
        raise UserError("the folder's name is not UTF-8", remedy="Name another one (-o DIR)") from None


def _refuse_taken(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file", remedy="Name a new folder (-o DIR)")
    if folder.is_dir() and any(folder.iterdir()):
        what = "a recording" if (folder / INFO_FILE).exists() else "files"
        raise UserError(
            f"{folder} already holds {what}", "it is never overwritten", "Name a new folder (-o DIR)"
        )


def _claim(folder: Path) -> None:
    try:
        (folder / SPOOL_FOLDER).mkdir()
    except FileExistsError:
        raise UserError(f"{folder} was taken by another run", remedy="Name a new folder (-o DIR)") from None
    except OSError as error:
        raise _cannot_create(folder, error) from None


def _mkdir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_create(folder, error) from None


def _cannot_create(folder: Path, error: OSError) -> UserError:
    return UserError(f"cannot create {folder}", error.strerror or str(error), "Name another folder (-o DIR)")


def remove(folder: Path, keep_folder: bool = False) -> None:
    """Remove what we made of a recording that never began, and the empty `runs` around it."""
    shutil.rmtree(folder, ignore_errors=True)
    if keep_folder:
        folder.mkdir(exist_ok=True)
    if folder.parent.name == "runs":
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


def initial_info(
    command: list[str], environment: Mapping[str, str], host: dict[str, Any], begin: ClockPair
) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "smaragdine_version": __version__,
        "status": "running",
        "command": command,
        "working_folder": _working_folder(),
        "environment": {name: environment[name] for name in STORED_VARIABLES if name in environment},
        "host": host,
        "clock": {"begin": {"wall_ns": begin.wall_ns, "mono_ns": begin.mono_ns}},
        "supervisor_pid": os.getpid(),
        "supervisor_start_ticks": start_ticks(os.getpid()),
        "boot_id": boot_id(),
        "channels": [],
        "absent": [],
    }


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # somebody has deleted it
        return None


def write_info(folder: Path, info: Mapping[str, Any]) -> OSError | None:
    """Replace run.json in one step. A reader sees the old or the new one; a full disk leaves the old one."""
    temporary = folder / f"{INFO_FILE}.new"
    try:
        temporary.write_bytes(sealed_json(info))
        os.replace(temporary, folder / INFO_FILE)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return error
    return None


def count_rows(folder: Path, rows: Mapping[str, int]) -> None:
    """Add to the run.json of a finished recording how many rows further tables have, so that a missing or
    foreign one is noticed.

    A run.json that somebody changed stays as it is: a new checksum would hide the change.
    """
    with contextlib.suppress(OSError):
        data = (folder / INFO_FILE).read_bytes()
        if not is_as_written(data):
            return
        info: dict[str, Any] = json.loads(data)
        # While a run goes on, its supervisor writes run.json. One that was interrupted counts nothing.
        if info["status"] != "running":
            counted = {**info.get("rows", {}), **rows}
            seals = {**info.get("seals", {}), **last_seals(folder, rows)}
            write_info(folder, {**info, "rows": counted, "seals": seals})
