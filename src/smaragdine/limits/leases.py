"""Leases: who holds which limit until when.

Each kind of limit of a device has one holder at most. However a lease ends, the previous value comes back.
This is bookkeeping alone: a clock tells the time, and a keeper sets the limits.
"""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Protocol

from smaragdine.clock import SYSTEM, Clock
from smaragdine.limits.keeper import Brought
from smaragdine.limits.nvml import Kind, LimitError, LimitValue, kind_words

DEFAULT_LEASE_S = 60.0
LONGEST_LEASE_S = 3600.0
_REMEMBERED = 256

# On the hardware, locked clocks override application clocks, so only one of them may be set.
_EXCLUDES: dict[Kind, tuple[Kind, ...]] = {
    "application_clocks": ("graphics_clock", "memory_clock"),
    "graphics_clock": ("application_clocks",),
    "memory_clock": ("application_clocks",),
}


@dataclass(frozen=True)
class Applied:
    """What was set in the end, and what before. `generation` says which keeper did it."""

    previous: LimitValue | None
    actual: LimitValue
    generation: int


class KeeperCalls(Protocol):
    """What leases need of a keeper: `KeeperClient` has it.

    `generation` changes when a keeper died, and the next one has brought everything back.
    """

    @property
    def generation(self) -> int: ...

    def set(self, device: str, kind: Kind, value: float, low: float = 0.0) -> Applied: ...

    def restore(self, device: str, kind: Kind) -> Brought: ...


@dataclass(frozen=True)
class Lease:
    lease_id: str
    owner: Hashable
    device: str
    kind: Kind
    asked: LimitValue
    actual: LimitValue
    previous: LimitValue | None
    deadline_ns: int  # monotonic
    expires_ns: int  # Unix time, for the holder
    generation: int


class Leases:
    """The table of leases, for one thread at a time."""

    def __init__(
        self,
        keeper: KeeperCalls,
        clock: Clock = SYSTEM,
        new_id: Callable[[], str] = lambda: secrets.token_urlsafe(16),
    ) -> None:
        self._keeper = keeper
        self._clock = clock
        self._new_id = new_id
        self._held: dict[str, Lease] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    def held(self) -> list[Lease]:
        return list(self._held.values())

    def set_limit(
        self,
        owner: Hashable,
        device: str,
        kind: Kind,
        value: float,
        low: float = 0.0,
        lease_s: float = 0.0,
        lease_id: str = "",
    ) -> Lease:
        """Set a limit and lend it. With the `lease_id` of an own lease, change it or only renew it.

        Raises `LimitError`.
        """
        length_s = _length_s(lease_s)
        self.expire()
        asked = LimitValue(value, low)
        if lease_id:
            return self._renew(self._own(owner, lease_id), device, kind, asked, length_s)
        self._refuse_if_held(device, kind)
        applied = self._keeper.set(device, kind, value, low)
        deadline_ns, expires_ns = self._until(length_s)
        new = Lease(
            lease_id=self._new_id(),
            owner=owner,
            device=device,
            kind=kind,
            asked=asked,
            actual=applied.actual,
            previous=applied.previous,
            deadline_ns=deadline_ns,
            expires_ns=expires_ns,
            generation=applied.generation,
        )
        self._held[new.lease_id] = new
        return new

    def release(self, owner: Hashable, lease_id: str) -> Brought:
        """End an own lease. Raises `LimitError` where it is not theirs, or the device does not answer."""
        self.expire()
        lease = self._own(owner, lease_id)
        self._end(lease, "it was released")
        return self._keeper.restore(lease.device, lease.kind)

    def owner_gone(self, owner: Hashable) -> list[Lease]:
        """End all leases of an owner that has ended."""
        self._drop_void()
        return self._end_all(
            [lease for lease in self._held.values() if lease.owner == owner], "its owner ended"
        )

    def expire(self) -> list[Lease]:
        """End the leases whose time is over, and those that became void when the keeper died."""
        void = self._drop_void()
        now_ns = self._clock.mono_ns()
        due = [lease for lease in self._held.values() if lease.deadline_ns <= now_ns]
        return void + self._end_all(due, "it expired")

    def _renew(self, lease: Lease, device: str, kind: Kind, asked: LimitValue, length_s: float) -> Lease:
        if (device, kind) != (lease.device, lease.kind):
            raise LimitError(
                "invalid", "no limit set", f"that lease is for {lease.device} {kind_words(lease.kind)}"
            )
        if asked != lease.asked:
            try:
                applied = self._keeper.set(device, kind, asked.value, asked.low)
            except LimitError as error:
                if error.code == "unavailable":
                    # Nobody knows what is set now, so the previous value is safer.
                    self._end_all([lease], "a change of it failed")
                raise
            lease = replace(lease, asked=asked, actual=applied.actual, generation=applied.generation)
        deadline_ns, expires_ns = self._until(length_s)
        renewed = replace(lease, deadline_ns=deadline_ns, expires_ns=expires_ns)
        self._held[lease.lease_id] = renewed
        return renewed

    def _own(self, owner: Hashable, lease_id: str) -> Lease:
        lease = self._held.get(lease_id)
        if lease is None:
            why = self._ended.get(lease_id, "it was never given, or ended long ago")
            raise LimitError("not_found", "no such lease", why, "Ask for a new one")
        if lease.owner != owner:
            raise LimitError("denied", "not your lease", "another user or process holds it")
        return lease

    def _refuse_if_held(self, device: str, kind: Kind) -> None:
        for lease in self._held.values():
            if lease.device == device and (lease.kind == kind or lease.kind in _EXCLUDES.get(kind, ())):
                left_s = math.ceil((lease.deadline_ns - self._clock.mono_ns()) / 1e9)
                raise LimitError(
                    "held",
                    f"{device} {kind_words(kind)} not set",
                    f"{lease.owner} holds its {kind_words(lease.kind)} for {left_s} s more, if not renewed",
                    "Wait for it, or ask the holder to release it",
                )

    def _drop_void(self) -> list[Lease]:
        now = self._keeper.generation
        void = [lease for lease in self._held.values() if lease.generation != now]
        for lease in void:
            # The new keeper has brought it back, from the journal.
            self._end(lease, "the limits' keeper was restarted and has brought everything back")
        return void

    def _end_all(self, leases: list[Lease], why: str) -> list[Lease]:
        for lease in leases:
            self._end(lease, why)
            try:
                self._keeper.restore(lease.device, lease.kind)
            except LimitError:
                # The keeper goes on trying by itself.
                continue
        return leases

    def _end(self, lease: Lease, why: str) -> None:
        del self._held[lease.lease_id]
        self._ended[lease.lease_id] = why
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _until(self, length_s: float) -> tuple[int, int]:
        length_ns = round(length_s * 1e9)
        return self._clock.mono_ns() + length_ns, self._clock.wall_ns() + length_ns


def _length_s(asked_s: float) -> float:
    if not 0 <= asked_s <= LONGEST_LEASE_S:
        why = f"a lease lasts more than 0 and at most {LONGEST_LEASE_S:g} s, not {asked_s:g}"
        raise LimitError("invalid", "no limit set", why, "Renew it while you need it")
    return asked_s or DEFAULT_LEASE_S
