"""Run the command line as another user, from tests that run as root."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import smaragdine
from cli import TIMEOUT_S

USER = 54331
# As the user, in a mount namespace in which the interpreter can be reached also where it lies in a closed
# folder (root's home): closed folders show nothing but what is needed from them.
_AS_USER = """
set -e
paths=$1; closed=$2; groups=$3; shift 3
hold=/mnt
mount -t tmpfs tmpfs "$hold"
number=0
for path in $paths; do
    number=$((number + 1)); mkdir "$hold/$number"; mount --bind "$path" "$hold/$number"
done
for folder in $closed; do mount -t tmpfs -o mode=755 tmpfs "$folder"; done
number=0
for path in $paths; do
    number=$((number + 1)); mkdir -p "$path"; mount --bind "$hold/$number" "$path"
done
exec setpriv --reuid UID --regid UID $groups "$@"
""".replace("UID", str(USER))


def as_user(groups: Sequence[int]) -> list[str]:
    """The words before a command that another user runs."""
    needed = [Path(sys.base_prefix), Path(sys.prefix), Path(smaragdine.__file__).parents[2]]
    hidden = {path: closed for path in needed if (closed := _closed_above(path)) is not None}
    numbers = f"--groups {','.join(map(str, groups))}" if groups else "--clear-groups"
    folders = " ".join(sorted({str(closed) for closed in hidden.values()}))
    return ["unshare", "-m", "sh", "-c", _AS_USER, "sh", " ".join(map(str, hidden)), folders, numbers]


def _closed_above(path: Path) -> Path | None:
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None


def cannot_play() -> str:
    """Why this machine does not let us; empty where it does."""
    look = [*as_user([]), sys.executable, "-c", "import os, smaragdine; print(os.geteuid())"]
    try:
        done = subprocess.run(look, capture_output=True, text=True, timeout=TIMEOUT_S, cwd="/")
    except OSError as error:
        return f"no util-linux: {error}"
    return "" if done.stdout.strip() == str(USER) else done.stderr.strip() or "no answer"
