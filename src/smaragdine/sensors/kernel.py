"""Which run of the kernel this is, and which process a number means: numbers of processes are used again."""

from __future__ import annotations

import errno
from pathlib import Path


def boot_id() -> str:
    """Names this run of the kernel; empty: it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_ticks(pid: int, proc: Path = Path("/proc")) -> int:
    """When a process started, in ticks since boot: with its number, who it is. 0: there is none."""
    try:
        with open(proc / str(pid) / "stat", "rb", buffering=0) as file:
            return int(file.read(1024).rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError) as error:
        if out_of_files(error):
            raise
        return 0


def out_of_files(error: BaseException) -> bool:
    """Whether it tells of our own want of descriptors, and not of what was to be opened."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
