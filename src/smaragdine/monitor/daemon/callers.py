"""Who is calling, and what they may do. The kernel says so, or a token; never a message."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import grp
import os
import pwd
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from smaragdine.errors import UserError
from smaragdine.monitor.daemon.settings import GROUP, Settings
from smaragdine.sensors.kernel import out_of_files, start_ticks

_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77  # Linux 6.5
_UCRED = struct.Struct("3i")
_MOST_GROUPS = 65536
_NO_GROUP = (1 << 32) - 1  # the kernel's -1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Owner:
    """Whom a lease belongs to: one process, or one token."""

    name: str
    pid: int = 0
    ticks: int = 0  # when the process started

    def __str__(self) -> str:
        return f"process {self.pid} of {self.name}" if self.pid else self.name


@dataclass(frozen=True)
class Caller:
    """One connection's peer. `key` names it where things are counted and owned."""

    key: str  # uid:1000, token:NAME
    user: str
    uid: int
    pid: int = 0  # 0: on another machine
    owner: Owner = Owner("")
    may_read: bool = False
    may_control: bool = False

    @property
    def is_root(self) -> bool:
        return self.uid == 0


@dataclass(frozen=True)
class Rights:
    """The groups, as numbers; -1 where there is none."""

    group: int
    control_group: int


def resolve_rights(settings: Settings) -> Rights:
    group = settings.group
    if not group:
        try:
            group = grp.getgrnam(GROUP).gr_name
        except KeyError:
            group = grp.getgrgid(0).gr_name
    control = _group_number(settings.control_group) if settings.control_group else -1
    return Rights(_group_number(group), control)


def _group_number(name: str) -> int:
    if name.isdecimal() and int(name) < _NO_GROUP:
        return int(name)  # in a container the host's groups have no names
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise UserError(
            f"there is no group {name}", remedy=f"Make it: sudo groupadd --system {name}"
        ) from None


def unix_caller(sock: socket.socket, rights: Rights) -> Caller:
    """The peer of a Unix socket, as the kernel noted it when it connected."""
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    groups = {gid, *_peer_groups(sock)}
    user = user_name(uid)
    return Caller(
        key=f"uid:{uid}",
        user=user,
        uid=uid,
        pid=pid,
        owner=Owner(user, pid, start_ticks(pid)),
        may_read=uid == 0 or rights.group in groups or rights.control_group in groups,
        may_control=uid == 0 or rights.control_group in groups,
    )


def _peer_groups(sock: socket.socket) -> tuple[int, ...]:
    """Through C: Python's own call stops at 256 groups, and a user may have 65536."""
    groups = (ctypes.c_uint32 * _MOST_GROUPS)()
    length = ctypes.c_uint32(ctypes.sizeof(groups))
    if _libc.getsockopt(sock.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, groups, ctypes.byref(length)) != 0:
        return ()  # before Linux 4.13: the main group has to do
    return tuple(groups[: length.value // 4])


def peer_pidfd(sock: socket.socket, caller: Caller) -> int | None:
    """A descriptor that becomes readable when the peer's process ends; None where it has ended."""
    with contextlib.suppress(OSError):
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        fd = struct.unpack("i", data)[0]
        os.set_inheritable(fd, False)
        return fd
    # Older kernels: the number may have been given to another process since, which then started later.
    fd = open_process(caller.pid)
    if fd is not None and start_ticks(caller.pid) != caller.owner.ticks:
        os.close(fd)
        return None
    return fd


def open_process(pid: int) -> int | None:
    """A pidfd; None: there is no such process. Raises OSError when no descriptor is left."""
    try:
        return os.pidfd_open(pid)
    except (OSError, OverflowError) as error:
        if out_of_files(error):
            raise
        return None


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def process_uids(pid: int, proc: Path = Path("/proc")) -> frozenset[int]:
    """The real, effective and saved user of a process; empty: there is none, or it is hidden from us."""
    try:
        with open(proc / str(pid) / "status", "rb", buffering=0) as file:
            fields = file.read(4096).partition(b"\nUid:")[2].split(b"\n", 1)[0].split()
        return frozenset(int(field) for field in fields[:3])
    except (OSError, ValueError) as error:
        if out_of_files(error):
            raise
        return frozenset()


@functools.lru_cache(maxsize=1024)
def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
