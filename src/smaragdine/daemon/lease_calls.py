"""The contract's calls about limits. A lease ends with the process that asked for it, however that ends."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from smaragdine.clock import SYSTEM, Clock
from smaragdine.daemon.callers import Caller, Owner
from smaragdine.daemon.server import Connection
from smaragdine.daemon.sessions import Refused
from smaragdine.limits.keeper import Brought
from smaragdine.limits.keeper_client import KeeperClient
from smaragdine.limits.leases import Lease, Leases
from smaragdine.limits.nvml import Kind, LimitError, LimitRange, kind_words
from smaragdine.monitor.contract import monitor_pb2 as pb

# Leases for the daemon's event loop. Every call goes through one thread, so that neither a driver that hangs
# nor a slow disk holds up the loop.

P = ParamSpec("P")
R = TypeVar("R")
_LOOK_S = 0.25


class AsyncLeases:
    """`Leases` as coroutines. Calls raise `LimitError`."""

    def __init__(
        self, keeper: KeeperClient, clock: Clock = SYSTEM, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._keeper = keeper
        self._leases = Leases(keeper, clock)
        self._say = say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leases")

    @property
    def count(self) -> int:
        return len(self._leases.held())

    def owners(self) -> set[Hashable]:
        return {lease.owner for lease in self._leases.held()}

    async def ranges(self) -> list[LimitRange]:
        return await self._call(self._keeper.ranges)

    async def set_limit(
        self,
        owner: Hashable,
        device: str,
        kind: Kind,
        value: float,
        low: float = 0.0,
        lease_s: float = 0.0,
        lease_id: str = "",
    ) -> Lease:
        return await self._call(self._leases.set_limit, owner, device, kind, value, low, lease_s, lease_id)

    async def release(self, owner: Hashable, lease_id: str) -> Brought:
        return await self._call(self._leases.release, owner, lease_id)

    async def owner_gone(self, owner: Hashable) -> list[Lease]:
        return await self._call(self._leases.owner_gone, owner)

    async def expire(self) -> list[Lease]:
        return await self._call(self._leases.expire)

    async def keep(self) -> None:
        """End leases when their time is over, as a task that lasts as long as the daemon."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.count:
                for lease in await self.expire():
                    self._say(
                        f"lease on {lease.device} {kind_words(lease.kind)} of {lease.owner} ended by itself"
                    )

    async def close(self, timeout_s: float = 0.8) -> None:
        """Have everything brought back. After the time limit the keeper goes on without us."""
        await asyncio.to_thread(self._keeper.close, timeout_s)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _call(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        bound = functools.partial(call, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, bound)


KINDS: dict[int, Kind] = {
    pb.LIMIT_KIND_POWER: "power",
    pb.LIMIT_KIND_GRAPHICS_CLOCK: "graphics_clock",
    pb.LIMIT_KIND_MEMORY_CLOCK: "memory_clock",
    pb.LIMIT_KIND_APPLICATION_CLOCKS: "application_clocks",
}
_NUMBERS = {kind: number for number, kind in KINDS.items()}
_STATUS = {
    "invalid": "INVALID_ARGUMENT",
    "not_found": "NOT_FOUND",
    "denied": "PERMISSION_DENIED",
    "unsupported": "UNIMPLEMENTED",
    "unavailable": "UNAVAILABLE",
    "held": "FAILED_PRECONDITION",
}
_RANGES_KEPT_S = 1.0


class LeaseCalls:
    def __init__(self, leases: AsyncLeases | None, say: Callable[[str], None]) -> None:
        self._leases = leases
        self._say = say
        self._watched: dict[Owner, int] = {}  # a pidfd each
        self._connections: Counter[Owner] = Counter()  # of callers on other machines
        self._ranges: tuple[float, list[pb.LimitRange]] = (-_RANGES_KEPT_S, [])
        self._one_asks = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def count(self) -> int:
        return self._leases.count if self._leases is not None else 0

    async def ranges(self) -> list[pb.LimitRange]:
        """What can be limited; nothing where the driver does not answer."""
        # One question at a time: however many ask, leases must not wait behind all of them.
        async with self._one_asks:
            if self._leases is not None and time.monotonic() - self._ranges[0] >= _RANGES_KEPT_S:
                try:
                    found = [_range_message(limit) for limit in await self._leases.ranges()]
                except LimitError:
                    found = []
                self._ranges = (time.monotonic(), found)
            return self._ranges[1]

    async def set_limit(self, connection: Connection, caller: Caller, request: pb.SetLimitRequest) -> Any:
        leases = self._allowed(caller)
        kind = KINDS.get(request.kind)
        if kind is None:
            raise Refused("INVALID_ARGUMENT", f"there is no kind of limit {request.kind}")
        self._watch(connection, caller)
        try:
            lease = await leases.set_limit(
                caller.owner,
                request.device,
                kind,
                request.value,
                request.low,
                request.lease_s,
                request.lease_id,
            )
        except LimitError as error:
            raise Refused(_STATUS[error.code], str(error)) from None
        if caller.owner not in self._watched and caller.owner not in self._connections:
            # It ended while the driver was being asked.
            await leases.owner_gone(caller.owner)
            raise Refused("PERMISSION_DENIED", "the caller has ended")
        if not request.lease_id:
            self._say(
                f"{lease.device} {kind_words(lease.kind)} set to {lease.actual.value:g} for {caller.owner}"
            )
        return pb.SetLimitResponse(
            lease_id=lease.lease_id,
            expires_ns=lease.expires_ns,
            previous=None if lease.previous is None else lease.previous.value,
            previous_low=None if lease.previous is None else lease.previous.low,
            actual=lease.actual.value,
        )

    async def release(self, caller: Caller, request: pb.ReleaseRequest) -> Any:
        leases = self._allowed(caller)
        try:
            brought = await leases.release(caller.owner, request.lease_id)
        except LimitError as error:
            raise Refused(_STATUS[error.code], str(error)) from None
        return pb.ReleaseResponse(restored=None if brought.now is None else brought.now.value)

    def _allowed(self, caller: Caller) -> AsyncLeases:
        if not caller.may_control:
            line = f"{caller.user} may not set limits. Root may, and members of the daemon's --control-group"
            raise Refused("PERMISSION_DENIED", line)
        if self._leases is None:
            raise Refused("UNAVAILABLE", "this daemon cannot set limits: it was not started as root")
        return self._leases

    def _watch(self, connection: Connection, caller: Caller) -> None:
        """Watch for the caller's end: the end of its process, or of its last connection from elsewhere."""
        owner = caller.owner
        if connection.caller is None:
            if connection.lends_to != owner:
                connection.lends_to = owner
                self._connections[owner] += 1
                connection.on_close.append(lambda: self._connection_closed(owner))
            return
        if owner in self._watched:
            return
        pidfd = connection.process_fd()
        if pidfd is None:
            raise Refused("PERMISSION_DENIED", "the caller has ended")
        self._watched[owner] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended, owner)

    def _connection_closed(self, owner: Owner) -> None:
        self._connections[owner] -= 1
        if self._connections[owner] <= 0:
            del self._connections[owner]
            self._take_back(owner)

    def _ended(self, owner: Owner) -> None:
        self._unwatch(owner)
        self._take_back(owner)

    def _unwatch(self, owner: Owner) -> None:
        pidfd = self._watched.pop(owner)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)

    def _take_back(self, owner: Owner) -> None:
        if self._leases is None:
            return
        task = asyncio.get_running_loop().create_task(self._gone(self._leases, owner))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _gone(self, leases: AsyncLeases, owner: Owner) -> None:
        for lease in await leases.owner_gone(owner):
            self._say(
                f"{lease.device} {kind_words(lease.kind)}: {owner} has ended, the previous value is back"
            )


def _range_message(limit: Any) -> pb.LimitRange:
    message = pb.LimitRange(
        device=limit.device,
        kind=_NUMBERS[limit.kind],  # pyright: ignore[reportArgumentType]
        lowest=limit.lowest,
        highest=limit.highest,
        steps=limit.steps,
        low_steps=limit.low_steps,
    )
    if limit.current is not None:
        message.current, message.current_low = limit.current.value, limit.current.low
    if limit.default is not None:
        message.default, message.default_low = limit.default.value, limit.default.low
    return message
