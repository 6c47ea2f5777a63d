"""Profiles each type of GPU on a node of a Ray cluster that has it, all types at once.

Smaragdine must be installed on every node, with the program's folder under the same path. Points come here as
they are measured. A profile is of one GPU: if its node is lost, another GPU of the type begins anew, because
no two chips draw the same power.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from smaragdine.allocate.device import (
    REQUEST,
    Profiled,
    ProfiledDevice,
    Request,
    check_request,
    claim,
    devices_to_profile,
    file_stem,
    profile_device,
    refuse_other,
    write_json,
)
from smaragdine.errors import UserError
from smaragdine.files import read_json
from smaragdine.jobs import ray as cluster
from smaragdine.jobs.job import Stop
from smaragdine.jobs.lender import Say
from smaragdine.jobs.ray import stream

# What a node does for a profile: it measures its device, and sends each point as it comes. So what was
# measured is not lost with the node, and can be continued.
#
# It sends: device: what will be profiled · said: a line · files: an archive of the profile's folder ·
# profiled: the last one · refused: why there is none
What = Literal["device", "said", "files", "profiled", "refused"]


@dataclass(frozen=True)
class News:
    what: What
    value: Any


@dataclass(frozen=True)
class Known:
    """What was measured already, and on which device."""

    device: ProfiledDevice | None
    archive: bytes


def profile_on_node(request: Request, cwd: str, place: str, known: Known) -> Iterator[News]:
    """Called by Ray. `place` is the path of the profile's folder where it is gathered."""
    yield from stream(_profile, request, cwd, place, known)


def _profile(send: cluster.Send, request: Request, cwd: str, place: str, known: Known) -> None:
    with tempfile.TemporaryDirectory(prefix="smaragdine-") as name:
        folder = Path(name)

        def kept(stem: str) -> None:
            # The point comes last: if it is there, all is there.
            send(News("files", cluster.packed(folder, (f"{stem}.log", stem, f"{stem}.json"))))

        try:
            os.chdir(cwd)
            device = devices_to_profile(None, bool(request.limits_w), os.environ)[0]
            check_request(device, request)
            send(News("device", device))
            if known.device == device:
                cluster.unpack(known.archive, folder)
            journal = cluster.journal_for([device.name])
            profiled: Profiled = profile_device(
                device, request, folder, lambda line: send(News("said", line)), kept, journal
            )
            send(News("profiled", profiled))
        except UserError as error:
            send(News("refused", str(error).replace(name, place)))
        except OSError as error:
            send(News("refused", str(error)))


_DEVICE = "device.json"  # beside the request: which device of the type it is
_END = object()


@dataclass(frozen=True)
class OfType:
    """What is profiled on one type, and where it is gathered."""

    kind: str
    request: Request
    folder: Path

    def claimed(self) -> dict[str, Any]:
        return {**self.request.claimed(), "gpu_type": self.kind}


def profile_types(
    request: Request,
    limits_w: Mapping[str, Sequence[float]],
    types: Sequence[str],
    output: Path,
    address: str | None,
    say: Say,
    done: Callable[[str, Profiled], None],
    stop: Stop,
) -> None:
    """Profiles these types, or all of the cluster, into folders in `output`. `done` is given each profile
    with the stem of its file. `limits_w` has the limits of types that have their own."""
    ray = cluster.load_ray()
    with cluster.connected(ray, address):
        stop.take_over()
        slots = _of_interest(cluster.slots_of(ray.nodes()))
        asked = [
            OfType(kind, own, output / f"{file_stem(kind)}.profile")
            for kind, own in requests_by_type(request, limits_w, types, slots).items()
        ]
        for each in asked:
            refuse_other(each.folder, each.claimed())
        failed = _Types(ray, asked, say, done, stop).run()
    if len(failed) > 1:
        raise UserError(f"{' and '.join(failed)} cannot be profiled", "see above")
    for kind, why in failed.items():
        raise UserError(f"{kind} cannot be profiled", why)


def kind_of(slot: cluster.RaySlot) -> str:
    return slot.gpu_type or "gpu" if slot.gpu else "cpu"


def _of_interest(slots: Sequence[cluster.RaySlot]) -> list[cluster.RaySlot]:
    """Processors only if no node has a GPU."""
    return [slot for slot in slots if slot.gpu] or list(slots)


def requests_by_type(
    request: Request,
    limits_w: Mapping[str, Sequence[float]],
    types: Sequence[str],
    slots: Sequence[cluster.RaySlot],
) -> dict[str, Request]:
    """By type, spelled as in the cluster."""
    there = {file_stem(kind_of(slot)): kind_of(slot) for slot in slots}
    if not there:
        raise UserError("the cluster has no node that could be profiled", remedy="See ray status")
    for name in [*types, *limits_w]:
        if file_stem(name) not in there:
            raise cluster.no_such_type(name, slots)
    wanted = {there[file_stem(name)]: file_stem(name) for name in types or there}
    own = {file_stem(name): tuple(values) for name, values in limits_w.items()}
    for name in own:
        if name not in wanted.values():
            raise UserError(f"--power {name}=…", "this type is not profiled", "Name it in --gpu-type too")
    return {kind: replace(request, limits_w=own.get(name, request.limits_w)) for kind, name in wanted.items()}


class _Types:
    """Hands types to nodes, and gathers what they send."""

    def __init__(
        self, ray: Any, asked: Sequence[OfType], say: Say, done: Callable[[str, Profiled], None], stop: Stop
    ) -> None:
        self._ray, self._say, self._done, self._stop = ray, say, done, stop
        self._waiting = list(asked)
        self._running: dict[Any, tuple[cluster.RaySlot, OfType]] = {}
        self._failed: dict[str, str] = {}
        self._losses = cluster.Losses()
        self._lost_with: dict[str, set[str]] = {each.kind: set() for each in asked}  # nodes

    def run(self) -> dict[str, str]:
        """Returns which types have no profile, and why; if one fails, the others go on."""
        try:
            while not self._stop and (self._waiting or self._running):
                self._hand_out()
                if self._running:
                    ready, _ = self._ray.wait(list(self._running), timeout=cluster.LOOK_S, fetch_local=False)
                    for each in ready:
                        self._take(each)
                else:
                    time.sleep(cluster.LOOK_S)
        finally:
            cluster.cancel(self._ray, self._running)
        return self._failed

    def _hand_out(self) -> None:
        if not self._waiting:
            return
        slots = _of_interest(cluster.slots_of(self._ray.nodes()))
        for asked in list(self._waiting):
            own = [slot for slot in slots if kind_of(slot) == asked.kind]
            gone = self._losses.too_long(asked.kind, bool(own))
            if not own and not gone:
                continue
            self._waiting.remove(asked)
            if gone:
                self._fail(asked, "no node of this type is left. The same command again goes on")
                continue
            device, node = _device_in(asked.folder)
            # What was begun goes on where it was; what was lost, elsewhere if possible.
            lost_with = self._lost_with[asked.kind]
            slot = min(own, key=lambda slot: (slot.node_id in lost_with, slot.node != node))
            # A processor's only name is its node's.
            same = device is not None and (device.uuid is not None or slot.node == node)
            names = sorted(path.name for path in asked.folder.glob("*.json")) if same else []
            known = Known(device if same else None, cluster.packed(asked.folder, names))
            call = (profile_on_node, asked.request, os.getcwd(), str(asked.folder), known)
            self._running[cluster.submit(self._ray, slot, *call)] = slot, asked

    def _take(self, stream: Any) -> None:
        """Takes what a node has sent."""
        slot, asked = self._running[stream]
        try:
            # If the node is lost, this raises, or comes instead of a value.
            reference = next(stream, _END)
            news: News | None = None if reference is _END else self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            del self._running[stream]
            self._fail(asked, f"{slot.node}: {error.cause}")
            return
        except self._ray.exceptions.RayError as error:
            del self._running[stream]
            self._lose(slot, asked, error)
            return
        if news is None:
            del self._running[stream]
            return
        where = f"{asked.kind} on {slot.node}"
        if news.what == "said":
            self._say(f"{where}: {news.value}")
        elif news.what == "refused":
            self._fail(asked, f"{slot.node}: {news.value}")
        elif news.what == "files":
            cluster.unpack(news.value, asked.folder)
        elif news.what == "profiled":
            self._done(file_stem(asked.kind), news.value)
        else:
            self._begin(asked, news.value, slot.node)

    def _begin(self, asked: OfType, device: ProfiledDevice, node: str) -> None:
        claim(asked.folder, asked.claimed())
        before, where = _device_in(asked.folder)
        if before != device or (device.uuid is None and where != node):
            if before is not None:
                self._say(f"{asked.kind} begins anew on {node}: on {where} it was another")
            for path in asked.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != REQUEST:
                    path.unlink()
        write_json(asked.folder / _DEVICE, {**asdict(device), "node": node})

    def _lose(self, slot: cluster.RaySlot, asked: OfType, error: Exception) -> None:
        try:
            self._losses.add(asked.kind, error)
        except UserError as final:
            self._fail(asked, str(final))
            return
        self._lost_with[asked.kind].add(slot.node_id)
        self._waiting.append(asked)
        self._say(f"{asked.kind} was lost with {slot.node}: it runs again")

    def _fail(self, asked: OfType, why: str) -> None:
        self._failed[asked.kind] = why
        if len(self._lost_with) > 1:
            self._say(f"{asked.kind} cannot be profiled: {why}")


def _device_in(folder: Path) -> tuple[ProfiledDevice | None, str]:
    """The device of the points in the folder, and its node."""
    try:
        known: Any = read_json(folder / _DEVICE)
        return ProfiledDevice(known["name"], known["uuid"], known["model"]), known["node"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, ""
