"""A sensor over open file descriptors: one number behind each, read again and again.

RAPL zones, perf events and hwmon attributes differ only in how one finds and decodes the number.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from smaragdine.clock import SYSTEM, Clock
from smaragdine.sensors.base import Channel, SensorLost

# Hardware that is merely busy, asleep or slow answers with one of these and may answer better next time;
# any other error on an open descriptor means that its source is gone.
_TRANSIENT = frozenset(
    {errno.EAGAIN, errno.EINTR, errno.EIO, errno.EBUSY, errno.ENODATA, errno.ETIMEDOUT, errno.EREMOTEIO}
)

_FOLLOW_EVERY_NS = 1_000_000_000


def fetch_decimal(fd: int) -> int:
    """The decimal number at the beginning of a sysfs attribute."""
    return int(os.pread(fd, 32, 0))


def attribute_text(path: Path) -> str:
    """What a sysfs attribute says; empty where it is absent or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def open_decimal(path: Path) -> int:
    """Open an attribute and read it once: some refuse at open, some only at the first read (OSError)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _first_number(fd)
    except ValueError as error:
        os.close(fd)
        raise OSError(errno.EINVAL, f"not a number ({error})", str(path)) from None
    except OSError as error:
        os.close(fd)
        raise OSError(error.errno, error.strerror, str(path)) from None
    return fd


def _first_number(fd: int) -> int:
    for _ in range(4):
        try:
            return fetch_decimal(fd)
        except ValueError:
            # A plain file (a tree mounted or mirrored from elsewhere) is empty while it is being rewritten.
            time.sleep(0.002)
    return fetch_decimal(fd)


@dataclass(frozen=True)
class OpenChannel:
    """A channel, the descriptor behind it, and how many raw counts make one of the channel's unit.

    With a `path`, the descriptor follows the name when another file is put in its place.
    """

    channel: Channel
    fd: int
    per_unit: float
    path: Path | None = None


class DescriptorSensor:
    """Reads every descriptor at each call. A channel whose source goes ends alone; the last one raises."""

    def __init__(
        self,
        opened: Sequence[OpenChannel],
        *,
        period_ns: int,
        lane: str,
        fetch: Callable[[int], int] = fetch_decimal,
        clock: Clock = SYSTEM,
    ) -> None:
        self.period_ns = period_ns
        self.lane = lane
        self.ended: dict[str, str] = {}  # channel name and detail → why it ended
        self._channels = tuple(item.channel for item in opened)
        self._open = [(item.fd, index, item.per_unit) for index, item in enumerate(opened)]
        self._paths = {item.fd: item.path for item in opened if item.path is not None}
        self._fetch = fetch
        self._wall_ns = clock.wall_ns
        self._mono_ns = clock.mono_ns
        self._next_follow_ns = clock.mono_ns() + _FOLLOW_EVERY_NS

    def channels(self) -> Sequence[Channel]:
        return self._channels

    def read(self) -> Sequence[tuple[int, int, float]]:
        fetch, wall_ns = self._fetch, self._wall_ns
        if self._mono_ns() >= self._next_follow_ns:
            self._follow()
        readings: list[tuple[int, int, float]] = []
        gone: list[tuple[int, OSError]] = []
        for fd, index, per_unit in self._open:
            try:
                count = fetch(fd)
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    gone.append((fd, error))
                continue
            except ValueError:
                continue
            readings.append((wall_ns(), index, count / per_unit))
        if gone:
            self._drop(gone)
        if not self._open:
            raise SensorLost("; ".join(f"{name}: {why}" for name, why in self.ended.items()) or "closed")
        return readings

    def close(self) -> Sequence[tuple[int, int, float]]:
        self._next_follow_ns = 0
        try:
            last = self.read()
        except SensorLost:
            last = ()
        for fd, _, _ in self._open:
            os.close(fd)
        self._open = []
        return last

    def _follow(self) -> None:
        """Open anew what was replaced under its name; the old file would stand still for ever."""
        self._next_follow_ns = self._mono_ns() + _FOLLOW_EVERY_NS
        for fd, path in self._paths.items():
            try:
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    continue
                fresh = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # gone for now; what the descriptor says decides
            # The same number for the new file: nobody else needs to know.
            os.dup2(fresh, fd, inheritable=False)
            os.close(fresh)

    def _drop(self, gone: Sequence[tuple[int, OSError]]) -> None:
        errors = dict(gone)
        for fd, index, _ in self._open:
            if fd in errors:
                channel = self._channels[index]
                self.ended[f"{channel.name} ({channel.detail})"] = errors[fd].strerror or "unreadable"
                self._paths.pop(fd, None)
                os.close(fd)
        self._open = [item for item in self._open if item[0] not in errors]
