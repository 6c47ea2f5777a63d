"""Gives up what only root has, once the sensors are open: for good, and checks that it is gone.

A change of user reaches every thread (glibc sees to that), and takes root's capabilities with it. `fence`,
which keeps new ones away, reaches only the calling thread and those that it starts. So call it before there
are others, such as numpy's. In the end `drop` checks all threads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import re
import resource
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from smaragdine.errors import UserError

DEFAULT_USER = "smaragdine"
FALLBACK_USER = "nobody"

# The capabilities that some part of us may keep or name. The kernel never changes their numbers.
CAPABILITIES: Mapping[str, int] = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SETPCAP": 8,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_NICE": 23,
    "CAP_SYS_RESOURCE": 24,
    "CAP_PERFMON": 38,
}

_PR_SET_DUMPABLE = 4
_PR_GET_DUMPABLE = 3
_PR_SET_KEEPCAPS = 8
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_HIGHEST = 63  # as many as the kernel's two words have room for

# What lanes ask for later (monitor/sampler.py), and may then have without a capability.
_REALTIME_PRIORITY = 1
_NICE_CEILING = 20 + 10

_libc = ctypes.CDLL(None, use_errno=True)


def drop(user: str | None, keep: frozenset[str] = frozenset()) -> str:
    """Become `user` (else smaragdine, else nobody), with no capability but `keep`. Says what is left.

    Raises RuntimeError when something is left that should not be: a daemon must not go on then. If the caller
    is not root, it stays who it is, and gives up the rest.
    """
    mask = _mask(keep)
    account = find_user(user)
    change = os.geteuid() == 0
    if not change and user is not None and account.pw_uid != os.geteuid():
        raise UserError(f"cannot become {user}", "only root can", "Start the daemon with sudo")
    _allow_priority()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fence()
    if change:
        os.setgroups([])
        _prctl(_PR_SET_KEEPCAPS, 1 if mask else 0)
        os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
        os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    clear_capabilities(keep)
    # Do this last: a change of user resets it to the system's default.
    _prctl(_PR_SET_DUMPABLE, 0)
    uid, gid = (account.pw_uid, account.pw_gid) if change else (os.geteuid(), os.getegid())
    left = list(_left(uid, gid, mask, strict=change))
    if left:
        raise RuntimeError(f"privileges are left that should be gone: {'; '.join(left)}")
    return _words(uid, keep, change)


def find_user(user: str | None) -> pwd.struct_passwd:
    """The account to become. Never root: that would drop nothing."""
    for name in (user,) if user is not None else (DEFAULT_USER, FALLBACK_USER):
        try:
            account = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
        except (KeyError, OverflowError):
            continue
        if account.pw_uid == 0 or account.pw_gid == 0:
            raise UserError(f"cannot run as {name}", "it has root's user or group", "Name another --user")
        return account
    remedy = f"Make one: sudo useradd --system --no-create-home {DEFAULT_USER}"
    raise UserError(f"there is no user {user or DEFAULT_USER}", remedy=remedy)


def fence(keep: frozenset[str] = frozenset()) -> None:
    """From now on nothing that this thread or its children start can gain a privilege. Root may pass `keep`
    on.

    What the thread may do itself stays as it is.
    """
    mask = _mask(keep)
    effective, permitted, _ = _get_capabilities()
    for number in range(_HIGHEST + 1):
        if _prctl_result(_PR_CAPBSET_READ, number) != 1 or mask >> number & 1:
            continue
        # Only root can empty it, but no_new_privs makes it meaningless anyway.
        if effective >> CAPABILITIES["CAP_SETPCAP"] & 1:
            _prctl(_PR_CAPBSET_DROP, number)
    if _prctl_result(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL) < 0 and ctypes.get_errno() != errno.EINVAL:
        raise OSError(ctypes.get_errno(), "prctl(PR_CAP_AMBIENT)")
    _set_capabilities(effective, permitted, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def clear_capabilities(keep: frozenset[str] = frozenset()) -> None:
    """Leave the calling thread those of `keep` that it has, and no other."""
    mask = _mask(keep) & _get_capabilities()[1]
    _set_capabilities(mask, mask, 0)


def bound(keep: frozenset[str]) -> None:
    """For a process that stays root: have nothing but `keep`, neither itself nor through what it starts."""
    fence(keep)
    clear_capabilities(keep)


def hand_over(folder: Path, user: str | None, mode: int = 0o700, ours: re.Pattern[str] | None = None) -> None:
    """Make a folder that `user` owns, with files in it that root may have left, of names like `ours`.

    A folder that already belongs to the user is left alone: root must not trust what lies in it.
    """
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    if os.geteuid() != 0:
        return
    account = find_user(user)
    found = os.lstat(folder)
    if found.st_uid == account.pw_uid:
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid != 0 or found.st_mode & 0o022:
            why = "it belongs to another user" if found.st_uid else "others than root may write to it"
            raise UserError(f"cannot use {folder}", why, "Name another folder, or remove that one")
        names = os.listdir(fd)
        strange = [name for name in names if ours is not None and not ours.fullmatch(name)]
        if strange:
            why = f"it holds what is not the daemon's, such as {min(strange)}"
            raise UserError(f"cannot use {folder}", why, "Name another folder: it becomes the daemon's own")
        for name in names:
            os.chown(name, account.pw_uid, account.pw_gid, dir_fd=fd, follow_symlinks=False)
        os.fchmod(fd, mode)
        os.fchown(fd, account.pw_uid, account.pw_gid)
    finally:
        os.close(fd)


def _left(uid: int, gid: int, keep_mask: int, strict: bool) -> Iterator[str]:
    """What is left of root in any thread of this process. `strict`: also what only root could give up."""
    for status in sorted(Path("/proc/self/task").glob("*/status")):
        try:
            text = status.read_text()
        except OSError:
            continue  # a thread that has ended
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        thread = f"thread {status.parent.name}"
        own = status.parent.name == str(os.getpid())
        for name, wanted in (("Uid", uid), ("Gid", gid)):
            if set(map(int, fields[name].split())) != {wanted}:
                yield f"{thread}: {name} {fields[name].strip()}"
        for name in ("CapPrm", "CapEff", "CapInh", "CapAmb"):
            allowed = keep_mask if name in ("CapPrm", "CapEff") else 0
            if int(fields[name], 16) & ~allowed:
                yield f"{thread}: {name} {fields[name].strip()}"
        if strict and fields["Groups"].strip():
            yield f"{thread}: groups {fields['Groups'].strip()}"
        if strict and int(fields["CapBnd"], 16):
            yield f"{thread}: CapBnd {fields['CapBnd'].strip()}"
        if fields.get("NoNewPrivs", "1").strip() != "1":
            yield f"{thread}: new privileges are possible"
        if own and _prctl_result(_PR_GET_DUMPABLE) != 0:
            yield "memory can be dumped"
    if resource.getrlimit(resource.RLIMIT_CORE) != (0, 0):
        yield "core files are possible"
    if strict:
        try:
            os.setresuid(0, 0, 0)
        except PermissionError:
            return
        yield "uid 0 can be had again"


def _words(uid: int, keep: frozenset[str], changed: bool) -> str:
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    kept = ", ".join(sorted(keep)) or "no capabilities"
    if not changed:
        return f"user {name}, as it was started; {kept}"
    if name == FALLBACK_USER:
        return f"user {name}, which other programs may use too (a user {DEFAULT_USER} is better); {kept}"
    return f"user {name}, no other groups; {kept}"


def _allow_priority() -> None:
    """Let lanes take an early turn later without a capability, as far as the limits can still be raised."""
    for limit, value in (
        (resource.RLIMIT_RTPRIO, _REALTIME_PRIORITY),
        (resource.RLIMIT_NICE, _NICE_CEILING),
    ):
        soft, hard = resource.getrlimit(limit)
        if soft == resource.RLIM_INFINITY or soft >= value:
            continue
        try:
            resource.setrlimit(limit, (value, max(hard, value)))
        except (OSError, ValueError):
            continue


def _get_capabilities() -> tuple[int, int, int]:
    """The effective, permitted and inheritable ones of the calling thread."""
    words = ctypes.create_string_buffer(24)
    _check(_libc.capget(_capability_header(), words), "capget")
    low_e, low_p, low_i, high_e, high_p, high_i = struct.unpack("6I", words.raw)
    return low_e | high_e << 32, low_p | high_p << 32, low_i | high_i << 32


def _set_capabilities(effective: int, permitted: int, inheritable: int) -> None:
    sets = (effective, permitted, inheritable)
    words = struct.pack("6I", *(s & 0xFFFFFFFF for s in sets), *(s >> 32 for s in sets))
    _check(_libc.capset(_capability_header(), words), "capset")


def _capability_header() -> ctypes.Array[ctypes.c_char]:
    # Version and thread, 0 for the calling one. The kernel may write its own version into it.
    return ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0), 8)


def _mask(names: frozenset[str]) -> int:
    unknown = names - CAPABILITIES.keys()
    if unknown:
        raise ValueError(f"no such capability here: {', '.join(sorted(unknown))}")
    return sum(1 << CAPABILITIES[name] for name in names)


def _prctl(option: int, value: int) -> None:
    _check(_prctl_result(option, value), f"prctl({option}, {value})")


def _check(result: int, call: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def _prctl_result(option: int, value: int = 0) -> int:
    ctypes.set_errno(0)
    result: int = _libc.prctl(
        ctypes.c_int(option),
        ctypes.c_ulong(value),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )
    return result
