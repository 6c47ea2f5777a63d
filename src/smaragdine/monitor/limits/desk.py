"""Limits on loan for the daemon's event loop.

Every call goes through one thread, so that neither a driver that hangs nor a slow disk holds up the loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from smaragdine.clock import SYSTEM, Clock
from smaragdine.monitor.limits.control import Control
from smaragdine.monitor.limits.leases import Lease, Leases
from smaragdine.monitor.limits.setter import Brought
from smaragdine.sensors.nvml_limits import Kind, LimitRange, kind_words

P = ParamSpec("P")
R = TypeVar("R")
_LOOK_S = 0.25


class Desk:
    """Where leases are given and taken back. Calls raise `LimitError`."""

    def __init__(
        self, control: Control, clock: Clock = SYSTEM, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._control = control
        self._leases = Leases(control, clock)
        self._say = say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leases")

    @property
    def count(self) -> int:
        return len(self._leases.held())

    def owners(self) -> set[Hashable]:
        return {lease.owner for lease in self._leases.held()}

    async def ranges(self) -> list[LimitRange]:
        return await self._call(self._control.ranges)

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
        """A task for the daemon's life: ends leases when their time has come."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.count:
                for lease in await self.expire():
                    self._say(
                        f"lease on {lease.device} {kind_words(lease.kind)} of {lease.owner} ended by itself"
                    )

    async def close(self, timeout_s: float = 0.8) -> None:
        """Have everything brought back. Past the time limit the keeper goes on without us."""
        await asyncio.to_thread(self._control.close, timeout_s)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _call(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        bound = functools.partial(call, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, bound)
