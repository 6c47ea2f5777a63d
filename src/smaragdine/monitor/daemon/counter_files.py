"""Which files a privileged process opens for one that is not: energy counters, and nothing posing as one."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

ALLOWED_NAMES = frozenset({"energy_uj", "max_energy_range_uj"})
SYSFS_ROOT = Path("/sys/class/powercap")
SYSFS_REAL_ROOT = Path("/sys/devices/virtual/powercap")


def allowed_file(path: str, roots: Sequence[Path], trees: Sequence[Path]) -> int:
    """Open an energy counter below one of `roots` whose real place is in one of `trees`; OSError otherwise.

    It is looked at before it is opened for reading, and what was looked at is what is opened: links that are
    changed in between, pipes and devices lead nowhere.
    """
    asked = Path(path)
    named = asked.name in ALLOWED_NAMES and ".." not in asked.parts
    if not named or not any(asked.is_relative_to(root) for root in roots):
        raise OSError(errno.EPERM, "not an energy counter", path)
    place = os.open(asked, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(place)
        real = Path(os.readlink(f"/proc/self/fd/{place}"))
        inside = any(real.is_relative_to(tree) for tree in trees)
        if not inside or real.name != asked.name or not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise OSError(errno.EPERM, "not an energy counter", path)
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)


def real_trees(roots: Sequence[Path]) -> list[Path]:
    """Where files below these roots really lie: sysfs' class folders hold only links."""
    trees: list[Path] = []
    for root in roots:
        trees.append(Path(os.path.realpath(root)))
        if trees[-1] == SYSFS_ROOT:
            # Also where no zone is there yet.
            trees.append(SYSFS_REAL_ROOT)
        with contextlib.suppress(OSError):
            trees += [Path(os.path.realpath(entry)) for entry in root.iterdir() if entry.is_symlink()]
    return trees
