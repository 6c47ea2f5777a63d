"""Who is calling, and what they may do. The kernel or a token says so, never a message."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import grp
import hashlib
import hmac
import os
import pwd
import re
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from smaragdine.daemon.settings import GROUP, Settings
from smaragdine.errors import UserError
from smaragdine.files import write_whole
from smaragdine.system import out_of_files, start_ticks

_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77  # Linux 6.5
_UCRED = struct.Struct("3i")
_MOST_GROUPS = 65536
_NO_GROUP = (1 << 32) - 1  # the kernel's -1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Owner:
    """Who holds a lease: one process, or one token."""

    name: str
    pid: int = 0
    ticks: int = 0  # when the process started

    def __str__(self) -> str:
        return f"process {self.pid} of {self.name}" if self.pid else self.name


@dataclass(frozen=True)
class Caller:
    """The peer of one connection. `key` names it wherever we count things or note an owner."""

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
    """The two groups, as numbers; -1 where there is none."""

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
    """Ask through C: Python's own call stops at 256 groups, and a user may have 65536."""
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
    # Older kernels: another process may have the number by now. It started later, so its ticks differ.
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


# Tokens for callers over TCP. Their file holds only hashes, so that whoever reads it can use none of them.
# One line each: NAME USER EXPIRES RIGHTS SHA256. The caller acts as that USER of this machine.

RIGHTS = ("read", "control")
_HEAD = "# smaragdine tokens: NAME USER EXPIRES RIGHTS SHA256"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,63}")
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Credential:
    name: str
    user: str
    uid: int
    expires_s: float
    rights: frozenset[str]
    digest: bytes


def parse_tokens(text: str) -> tuple[list[Credential], list[str]]:
    """The tokens of a file, and a line about each entry that makes no sense. Such an entry lets nobody in."""
    tokens: list[Credential] = []
    wrong: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            name, user, expires, rights, digest = words
            expires_at = datetime.fromisoformat(expires)
            if expires_at.tzinfo is None:
                raise ValueError(f"{expires} has no time zone")
            granted = frozenset(rights.split(","))
            hashed = bytes.fromhex(digest)
            if len(hashed) != 32 or not granted <= set(RIGHTS):
                raise ValueError(f"rights are {','.join(RIGHTS)}, the hash has 64 digits")
            tokens.append(
                Credential(name, user, pwd.getpwnam(user).pw_uid, expires_at.timestamp(), granted, hashed)
            )
        except (ValueError, KeyError) as error:
            wrong.append(f"line {number}: {error}")
    return tokens, wrong


class CredentialFile:
    """The tokens of a file, read again whenever it changes. If the file is gone, nobody gets in."""

    def __init__(
        self, path: Path, say: Callable[[str], None], now_s: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._say = say
        self._now_s = now_s
        self._seen: tuple[int, int, int] | None = None
        self._tokens: list[Credential] = []
        self._refresh()

    def caller(self, authorization: str) -> Caller | None:
        """Who holds this `Bearer …`; None where nobody does, or its time is over."""
        self._refresh()
        kind, _, secret = authorization.partition(" ")
        digest = hashlib.sha256(secret.strip().encode("utf-8", "replace")).digest()
        found: Credential | None = None
        for token in self._tokens:
            # Compare with all of them: how long it takes must tell nothing.
            if hmac.compare_digest(token.digest, digest):
                found = token
        if found is None or kind.lower() != "bearer" or found.expires_s <= self._now_s():
            return None
        return Caller(
            key=f"token:{found.name}",
            user=found.user,
            uid=found.uid,
            owner=Owner(f"token {found.name}"),
            may_read="read" in found.rights or "control" in found.rights,
            may_control="control" in found.rights,
        )

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen == self._seen:
                return
            self._tokens, wrong = parse_tokens(self._path.read_text("utf-8", "replace"))
            self._seen = seen
            for line in wrong:
                self._say(f"{self._path}: {line}: ignored")
        except OSError as error:
            if self._tokens or self._seen is not None:
                self._say(f"no token is valid: {error}")
            self._tokens, self._seen = [], None


def add_token(path: Path, name: str, user: str, days: float, rights: frozenset[str]) -> str:
    """Put a new token into the file, or in place of an old one. Returns the secret, which is kept nowhere."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} is no name for a token", remedy="Letters, digits and ._- , at most 63")
    if not rights or not rights <= set(RIGHTS):
        raise UserError("unknown rights", remedy=f"There are: {', '.join(RIGHTS)}")
    try:
        pwd.getpwnam(user)
    except KeyError:
        raise UserError(
            f"there is no user {user} here", remedy="A token acts as a user of this machine"
        ) from None
    secret = secrets.token_urlsafe(32)
    expires = datetime.fromtimestamp(time.time() + days * 86400, UTC).strftime(_TIME)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    try:
        kept = [line for line in _lines(path) if line.split()[:1] != [name]]
        entry = f"{name} {user} {expires} {','.join(sorted(rights))} {digest}"
        text = "".join(f"{line}\n" for line in [*(kept or [_HEAD]), entry])
        # Anybody may read hashes of random secrets, and the daemon may be another user.
        write_whole(path, text, 0o644, durable=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written", error.strerror or str(error)) from None
    return secret


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
    except UnicodeDecodeError:
        raise UserError(f"{path} is no file of tokens", "it is not text", "Move it away") from None
