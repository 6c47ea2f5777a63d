"""How a Ray worker calls something that sets limits or runs programs: in a child.

    python -m smaragdine.sweep.ray_child      # what to call is on stdin, what it gives on stdout

A Ray worker kills its children when it ends, and would kill the limits' keeper before it has brought anything
back. So all of this is done by one child, which dies with the worker, and whose own children do what they are
there for.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from smaragdine.monitor.limits.journal import DEFAULT_JOURNAL
from smaragdine.sweep.limits import JOURNAL_VARIABLE

_PR_SET_PDEATHSIG = 1

Send = Callable[[Any], None]


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a module's function gives, called in a child."""
    (given,) = _from_child(False, function, arguments)
    return given


def stream(function: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """What a module's function sends, called in a child with a `Send` before its arguments."""
    return _from_child(True, function, arguments)


def _from_child(sends: bool, function: Callable[..., Any], arguments: Sequence[Any]) -> Iterator[Any]:
    command = [sys.executable, "-P", "-m", "smaragdine.sweep.ray_child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(pickle.dumps((os.getpid(), sends, function, arguments)))
        child.stdin.close()
        # The length first: a child that dies midway leaves no half of a pickle to be read.
        while len(head := child.stdout.read(8)) == 8:
            size = int.from_bytes(head, "big")
            if len(body := child.stdout.read(size)) == size:
                yield pickle.loads(body)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent, sends, function, arguments = pickle.loads(sys.stdin.buffer.read())
    if os.getppid() != parent:
        os._exit(1)
    with open(os.dup(1), "wb") as answer:
        os.dup2(2, 1)

        def send(value: Any) -> None:
            body = pickle.dumps(value)
            answer.write(len(body).to_bytes(8, "big") + body)
            answer.flush()

        if sends:
            function(send, *arguments)
        else:
            send(function(*arguments))
    os._exit(0)


def journal_for(devices: Sequence[str]) -> Path:
    """One for each device: several are at work on a node at once."""
    path = Path(os.environ.get(JOURNAL_VARIABLE) or DEFAULT_JOURNAL)
    return path.with_name("-".join([path.name, *(device.replace(":", "") for device in devices)]))


def packed(folder: Path, names: Iterable[str] = (".",)) -> bytes:
    """An archive of those of these that are in the folder."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
        for name in names:
            if (folder / name).exists():
                archive.add(folder / name, arcname=name)
    return out.getvalue()


def unpack(archive: bytes, folder: Path) -> None:
    """Folders in it take the place of those that have their names."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as members:
        for name in {member.name.partition("/")[0] for member in members if member.isdir()} - {"."}:
            shutil.rmtree(folder / name, ignore_errors=True)
        members.extractall(folder, filter="data")


if __name__ == "__main__":
    main()
