"""The lender: gives a job the limits that its setting asks for, and takes them back.

Where a daemon runs, the limits are its leases. Else a keeper of our own sets them, and another one stands by.
Either way the previous limits come back, however this process ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from smaragdine.errors import UserError
from smaragdine.jobs.setting import Setting
from smaragdine.limits.journal import DEFAULT_JOURNAL
from smaragdine.limits.keeper_client import KeeperClient, keeper_command, own_keeper
from smaragdine.limits.nvml import (
    Kind,
    LimitedGpu,
    LimitRange,
    kind_words,
    limit_ranges,
    open_gpus,
    setting_words,
)
from smaragdine.limits.nvml import LimitValue as Limit
from smaragdine.sensors.nvml.cuda import has_indices, visible_gpus
from smaragdine.sensors.nvml.gpus import ask, hold_library, nvml, release_library, text

if TYPE_CHECKING:
    from smaragdine.monitor.client import Client


# Should somebody kill us and our keeper together, a shell is left that starts another keeper.

# A line on its stdin means that all is well. If stdin ends without one, we are gone: the keeper that starts
# then waits for ours to end, and brings back what the journal still has.
_WAIT = 'read -r line || exec "$@" </dev/null'


@contextlib.contextmanager
def standby_keeper(journal: Path) -> Iterator[None]:
    """Another keeper brings limits back even if this process and its keeper die within the block."""
    # In a session of its own, the terminal's signals do not reach it.
    standby = subprocess.Popen(
        ["/bin/sh", "-c", _WAIT, "limits-standby", *keeper_command(journal)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            standby.communicate(b"\n")


JOURNAL_VARIABLE = "SMARAGDINE_LIMITS_JOURNAL"
_LEASE_S = 60.0

Wanted = Mapping[tuple[str, Kind], Limit]  # (device, kind) → value
Say = Callable[[str], None]


class Lender(Protocol):
    """Sets limits for a job. At the end of `lender`'s block they are as before. Calls raise `UserError`."""

    def apply(self, wanted: Wanted) -> None:
        """Set these, and bring back all others that were set before."""
        ...

    def held(self) -> bool:
        """Whether everything that was applied has stood ever since."""
        ...


@contextlib.contextmanager
def gpus_here() -> Iterator[list[LimitedGpu]]:
    """The GPUs that answer. Without a driver there are none."""
    try:
        hold_library()
    except (ImportError, nvml().NVMLError):
        yield []
        return
    try:
        yield ask(open_gpus) or []
    finally:
        release_library()


def ranges_here() -> list[LimitRange]:
    """What may be set on this machine. Only asks the driver."""
    with gpus_here() as gpus:
        return [found for gpu in gpus for found in limit_ranges(gpu)]


def devices_here(named: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """UUIDs by device: of those named, or of all that a program with this environment sees."""
    with gpus_here() as gpus:
        names = {text(ask(nvml().nvmlDeviceGetName, gpu.handle) or "") for gpu in gpus}
    known = {gpu.device: gpu.uuid for gpu in gpus}
    missing = [device for device in named if device not in known]
    if missing:
        raise UserError(f"there is no {missing[0]}", f"there is {', '.join(known) or 'no GPU'}")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if named or visible is None:
        return {device: known[device] for device in named or known}
    if has_indices(visible) and len(names) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        why = f"CUDA_VISIBLE_DEVICES={visible} counts GPUs of different models in CUDA's own order"
        raise UserError("which GPUs?", why, "Name them: --devices gpu:0,…")
    seen = visible_gpus(visible, [gpu.uuid for gpu in gpus], range(len(gpus)), lambda uuid: None)
    return {gpus[n].device: gpus[n].uuid for n in sorted(seen.positions)}


def temperature_c(devices: Sequence[str]) -> float | None:
    """The temperature of the hottest device; None where it cannot be read."""
    lib = nvml()
    with gpus_here() as gpus:
        found = [
            ask(lib.nvmlDeviceGetTemperature, gpu.handle, lib.NVML_TEMPERATURE_GPU)
            for gpu in gpus
            if gpu.device in devices
        ]
    known = [float(each) for each in found if each is not None]
    return max(known, default=None)


def wanted_limits(setting: Setting, devices: Sequence[str], ranges: Sequence[LimitRange]) -> Wanted:
    """What to set on which device. Refuses what a device does not allow, and says what it does."""
    of = {(each.device, each.kind): each for each in ranges}
    if setting.limit_kind == "parameter":
        return {}
    if not devices:
        raise UserError("no GPU whose limits could be set", "none was found", "See smaragdine doctor")
    wanted: dict[tuple[str, Kind], Limit] = {}
    for device in devices:
        if setting.power_limit_w is not None:
            wanted[device, "power"] = Limit(setting.power_limit_w)
        if setting.graphics_clock_mhz is not None and setting.memory_clock_mhz is not None:
            memory, graphics = setting.memory_clock_mhz, setting.graphics_clock_mhz
            if (device, "application_clocks") in of:
                wanted[device, "application_clocks"] = Limit(graphics, memory)
                continue
            wanted[device, "graphics_clock"] = Limit(graphics)
            only = of.get((device, "memory_clock"))
            # Many boards have only one memory clock, which cannot be locked.
            if only is None or only.steps != (memory,):
                wanted[device, "memory_clock"] = Limit(memory)
    for (device, kind), limit in wanted.items():
        _check(device, kind, limit, of.get((device, kind)))
    return wanted


def _check(device: str, kind: Kind, limit: Limit, allowed: LimitRange | None) -> None:
    what = f"{device} {kind_words(kind)} of {setting_words(kind, limit)}"
    if allowed is None:
        raise UserError(what, "this device or its driver has no such limit", "See smaragdine doctor")
    if not allowed.lowest <= limit.value <= allowed.highest:
        unit = "W" if kind == "power" else "MHz"
        span = f"{allowed.lowest:g} to {allowed.highest:g} {unit}"
        raise UserError(what, "outside the device's range", f"Allowed: {span}")
    for value, steps in ((limit.value, allowed.steps), (limit.low, allowed.low_steps)):
        if steps and value not in steps:
            near = ", ".join(f"{step:g}" for step in sorted(steps, key=lambda step: abs(step - value))[:3])
            raise UserError(what, f"{value:g} MHz is not one of its clocks", f"Nearest: {near} MHz")


@contextlib.contextmanager
def lender(say: Say, journal: Path | None = None) -> Iterator[Lender]:
    """Who sets limits here: a daemon where one answers, else a keeper of our own."""
    client = _daemon()
    if client is not None:
        with client:
            lender = _DaemonLender(client, say)
            try:
                yield lender
            finally:
                lender.close()
        return
    path = journal or Path(os.environ.get(JOURNAL_VARIABLE) or DEFAULT_JOURNAL)
    there = next(folder for folder in path.parents if folder.exists())
    if not os.access(there, os.W_OK):
        raise UserError(
            "limits cannot be set",
            f"no daemon answers, and what they were before cannot be noted in {path.parent}",
            "Start smaragdine daemon as root, or run this as root",
        )
    with standby_keeper(path), own_keeper(path, say=say) as keeper:
        yield _KeeperLender(keeper)


def try_all(lender: Lender, settings: Sequence[Wanted]) -> None:
    """Set each once before anything runs: a driver may refuse a limit for reasons of its own."""
    for wanted in settings:
        lender.apply(wanted)
    lender.apply({})


class _KeeperLender:
    """Lends through a keeper of our own."""

    def __init__(self, keeper: KeeperClient) -> None:
        self._keeper = keeper
        self._set: dict[tuple[str, Kind], Limit] = {}
        self._generation = keeper.generation

    def apply(self, wanted: Wanted) -> None:
        if not self.held():
            self._keeper.wait_ready()
            self._set.clear()
        for device, kind in [key for key in self._set if key not in wanted]:
            self._keeper.restore(device, kind)
            del self._set[device, kind]
        self._generation = self._keeper.generation
        for (device, kind), limit in wanted.items():
            if self._set.get((device, kind)) != limit:
                self._keeper.set(device, kind, limit.value, limit.low)
                self._set[device, kind] = limit

    def held(self) -> bool:
        return self._generation == self._keeper.generation


class _DaemonLender:
    """Lends through the daemon. Its leases end with this process, or when nobody renews them."""

    def __init__(self, client: Client, say: Say) -> None:
        self._client = client
        self._say = say
        self._lock = threading.Lock()
        self._set: dict[tuple[str, Kind], tuple[str, Limit]] = {}
        self._lost = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="leases", daemon=True)
        self._thread.start()

    def apply(self, wanted: Wanted) -> None:
        with self._lock:
            self._lost = False
            for key in [key for key in self._set if key not in wanted]:
                self._release(self._set.pop(key)[0])
            for key, limit in wanted.items():
                try:
                    self._ask(key, limit)
                except UserError as error:
                    if key not in self._set or not _is_gone(error):
                        raise
                    del self._set[key]
                    self._ask(key, limit)

    def held(self) -> bool:
        with self._lock:
            return self._renew_all() and not self._lost

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(UserError):
            self.apply({})

    def _release(self, lease: str) -> None:
        from smaragdine.monitor.client import DaemonError

        try:
            self._client.release(lease)
        except DaemonError as error:
            if error.status != "NOT_FOUND":  # it has ended by itself
                raise

    def _ask(self, key: tuple[str, Kind], limit: Limit) -> None:
        from smaragdine.monitor.contract import monitor_pb2 as pb

        lease, _ = self._set.get(key, ("", limit))
        device, kind = key
        number = pb.LimitKind.Value(f"LIMIT_KIND_{kind.upper()}")
        answer = self._client.set_limit(device, number, limit.value, limit.low, _LEASE_S, lease)
        self._set[key] = answer.lease_id, limit

    def _renew(self) -> None:
        while not self._closing.wait(_LEASE_S / 4):
            with self._lock:
                self._renew_all()

    def _renew_all(self) -> bool:
        """Whether all are known to stand. A daemon that does not answer now may still have them."""
        known = True
        for key, (_, limit) in list(self._set.items()):
            try:
                self._ask(key, limit)
            except UserError as error:
                known = False
                if _is_gone(error):
                    del self._set[key]
                    self._say(str(error))
                    self._lost = True
        return known


def _is_gone(error: UserError) -> bool:
    """Whether a lease has ended. A daemon that does not answer keeps it until its time is over."""
    return getattr(error, "status", "") not in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


def _daemon() -> Client | None:
    from smaragdine.monitor.client import DaemonError, connect
    from smaragdine.monitor.contract import ADDRESS_VARIABLE, DEFAULT_SOCKET

    named = os.environ.get(ADDRESS_VARIABLE)
    if not named and not Path(DEFAULT_SOCKET).exists():
        return None
    client = connect()
    try:
        described = client.describe()
    except DaemonError as error:
        client.close()
        # A socket that a daemon left behind is no daemon.
        if error.status == "UNAVAILABLE" and not named:
            return None
        raise
    if not described.may_control:
        client.close()
        remedy = "Have an administrator add you to the daemon's --control-group"
        raise UserError("limits cannot be set", "this machine's daemon does not let you", remedy)
    return client
