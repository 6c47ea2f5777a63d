"""A Ray cluster: which devices it has, and how we call a function on one of them.

Nodes differ by the type of their GPUs, which Ray knows as the label `ray.io/accelerator-type` or the resource
`accelerator_type:NAME`.
"""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smaragdine.errors import UserError
from smaragdine.jobs.lender import JOURNAL_VARIABLE
from smaragdine.limits.journal import DEFAULT_JOURNAL
from smaragdine.messages import Child, Inbox, Message, keep_stdout_for_messages, module_command, send
from smaragdine.system import end_with_parent

# How a Ray worker calls something that sets limits or runs programs: in a child.
#
#     python -m smaragdine.jobs.ray PARENT    # what to call, and what it gives, are messages
#
# A Ray worker kills its children when it ends, and would kill the limits' keeper before it has brought
# anything back. So one child does all of this. It dies with the worker, and its own children live on until
# they have done what they are there for.
#
# What goes back and forth is what Ray itself carries as pickles: dataclasses, and recordings as archives. So
# it is a pickle here too, inside of the message, and a message may be as long as a recording.

_LONGEST_BYTES = 16 << 30

Send = Callable[[Any], None]


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module's function in a child, and return what it returns."""
    (given,) = _from_child(False, function, arguments)
    return given


def stream(function: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Call a module's function in a child, with a `Send` before its arguments, and yield what it sends."""
    return _from_child(True, function, arguments)


def _from_child(sends: bool, function: Callable[..., Any], arguments: Sequence[Any]) -> Iterator[Any]:
    command = module_command("smaragdine.jobs.ray", str(os.getpid()))
    child = Child(command, longest_bytes=_LONGEST_BYTES)
    try:
        child.send(_packed_value((sends, function, arguments)))
        child.hang_up()
        for message in child.inbox:
            yield _value(message)
    finally:
        returncode = child.end()
    if returncode:
        raise subprocess.CalledProcessError(returncode, command)


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    request = Inbox(0, _LONGEST_BYTES).receive()
    if request is None:
        os._exit(1)
    sends, function, arguments = _value(request)
    answers = keep_stdout_for_messages()

    def give(value: Any) -> None:
        send(answers, _packed_value(value))

    if sends:
        function(give, *arguments)
    else:
        give(function(*arguments))
    os._exit(0)


def _packed_value(value: Any) -> Message:
    return {"pickle": base64.b64encode(pickle.dumps(value)).decode()}


def _value(message: Message) -> Any:
    return pickle.loads(base64.b64decode(message["pickle"]))


def journal_for(devices: Sequence[str]) -> Path:
    """A journal for these devices alone: several jobs work on a node at once."""
    path = Path(os.environ.get(JOURNAL_VARIABLE) or DEFAULT_JOURNAL)
    return path.with_name("-".join([path.name, *(device.replace(":", "") for device in devices)]))


def packed(folder: Path, names: Iterable[str] = (".",)) -> bytes:
    """An archive of what is there of these names in the folder."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
        for name in names:
            if (folder / name).exists():
                archive.add(folder / name, arcname=name)
    return out.getvalue()


def unpack(archive: bytes, folder: Path) -> None:
    """Unpack it into the folder. A folder in it replaces the one of its name."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as members:
        for name in {member.name.partition("/")[0] for member in members if member.isdir()} - {"."}:
            shutil.rmtree(folder / name, ignore_errors=True)
        members.extractall(folder, filter="data")


LOOK_S = 0.5
_CONNECT_S = 10.0
_PATIENCE_S = 60.0  # how long a cluster without a node is waited for
_MOST_LOSSES = 3
_LABEL, _RESOURCE = "ray.io/accelerator-type", "accelerator_type:"


@dataclass(frozen=True)
class RaySlot:
    """One device: a GPU of a node, or a node without any."""

    node_id: str
    node: str
    number: int
    gpu: bool
    gpu_type: str | None
    cpus: float


def slots_of(nodes: Sequence[dict[str, Any]]) -> list[RaySlot]:
    """The devices of the nodes that are alive."""
    slots: list[RaySlot] = []
    for node in nodes:
        resources = node.get("Resources", {})
        if not node.get("Alive") or not resources.get("CPU"):
            continue
        gpus = int(resources.get("GPU", 0))
        kinds = [name.removeprefix(_RESOURCE) for name in resources if name.startswith(_RESOURCE)]
        kind = node.get("Labels", {}).get(_LABEL) or (kinds[0] if kinds else None)
        name = node.get("NodeName") or node.get("NodeManagerHostname") or node["NodeID"][:8]
        if name == node.get("NodeManagerAddress"):
            name = node.get("NodeManagerHostname") or name
        # Ask for this GPU's share of all CPUs: Ray gives a program no more threads than it asked for.
        cpus = max(1.0, resources["CPU"] // max(1, gpus))
        slots += [RaySlot(node["NodeID"], name, n, gpus > 0, kind, cpus) for n in range(max(1, gpus))]
    return sorted(slots, key=lambda slot: (slot.node, slot.node_id, slot.number))


def submit(ray: Any, slot: RaySlot, call: Any, *arguments: Any) -> Any:
    """Have this device run `call`. Returns Ray's reference; for a generator, one that yields references."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(call).options(
        num_cpus=slot.cpus,
        num_gpus=1 if slot.gpu else 0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node_id, soft=False),
    )
    return remote.remote(*arguments)


def cancel(ray: Any, references: Iterable[Any]) -> None:
    """Kill the workers, and the programs with them. Keepers bring the limits back."""
    for reference in references:
        with contextlib.suppress(Exception):
            ray.cancel(reference, force=True)


def no_such_type(kind: str, slots: Sequence[RaySlot]) -> UserError:
    there = sorted({slot.gpu_type for slot in slots if slot.gpu_type})
    return UserError(f"no node has a GPU of type {kind}", f"there are: {', '.join(there) or 'none'}")


class Losses:
    """Counts how often something was lost with its node. It runs again, but not for ever."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._alone_since_s: dict[str, float] = {}

    def add(self, name: str, error: Exception) -> None:
        self._count[name] += 1
        if self._count[name] > _MOST_LOSSES:
            why = f"it was lost {_MOST_LOSSES + 1} times"
            raise UserError(f"{name} cannot be finished", why, str(error).splitlines()[0]) from None

    def too_long(self, name: str, there: bool) -> bool:
        """Whether no node for this has been there for too long. Ask again and again."""
        if there:
            self._alone_since_s.pop(name, None)
            return False
        now_s = time.monotonic()
        return now_s - self._alone_since_s.setdefault(name, now_s) > _PATIENCE_S


@contextlib.contextmanager
def connected(ray: Any, address: str | None) -> Iterator[None]:
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    host, _, port = where.rpartition(":")
    try:
        if host and port.isdigit() and "/" not in host:
            # Ray itself would try for minutes, with a line for each attempt.
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(
            address=where,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        why = f"{where}: {error}".splitlines()[0].rstrip(".")
        raise UserError("no Ray cluster", why, "Start one: ray start --head. Or name it: --address") from None
    try:
        yield
    finally:
        ray.shutdown()


def load_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UserError("--engine ray", "Ray is not installed", "pip install 'smaragdine[ray]'") from None
    return ray


if __name__ == "__main__":
    main()
