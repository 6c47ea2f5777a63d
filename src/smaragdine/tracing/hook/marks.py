"""Marks of this process, one JSON line each, in a file of its own.

A mark costs a few microseconds, and the program never feels it: we count what goes wrong, and do nothing
else.
"""

import os
import time

from .state import process

_state = process.marks

_LONGEST_WAIT_NS = 100000000


_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def set_spool(path):
    """Send marks to this folder from now on; None stops them."""
    handle, _state.file = _state.file, None
    _state.spool = None if path is None else os.path.abspath(path)
    if handle is not None and handle[0] == os.getpid() and _ours(handle):
        os.close(handle[1])


def wanted():
    """Whether somebody records."""
    return _state.spool is not None


def mark(name, index=None, *, source, total=None, t_ns=None, detail=None):
    """Append one mark; does nothing where nobody records."""
    if _state.spool is None:
        return
    if t_ns is None:
        t_ns = time.time_ns()
    try:
        pid = os.getpid()
        line = _line(pid, t_ns, name, index, source)
        if total is not None:
            line += ',"total":%d' % total
        if detail is not None:
            line += ',"detail":' + _json(detail)
        _write(pid, (_waiting(pid) + line + "}\n").encode("ascii"))
    except Exception:
        _state.dropped += 1
    follower = _state.follower
    if follower is not None:
        follower(name, index, source, t_ns)


def soon(t_ns, name, index, source):
    """Append one of thousands of marks: it may wait a tenth of a second, and the next one takes it along."""
    if _state.spool is None:
        return
    try:
        pid = os.getpid()
        waiting = _state.waiting
        waiting.append((pid, t_ns, name, index, source))
        if t_ns - _state.waiting_since_ns > _LONGEST_WAIT_NS or len(waiting) > 1000:
            _state.waiting_since_ns = t_ns
            _write(pid, _waiting(pid).encode("ascii"))
    except Exception:
        _state.dropped += 1
    follower = _state.follower
    if follower is not None and name == "step_end":
        follower(name, index, source, t_ns)


def flush():
    """Write the marks that wait; the process is about to end."""
    if _state.spool is None:
        return
    try:
        pid = os.getpid()
        data = _waiting(pid)
        if data:
            _write(pid, data.encode("ascii"))
    except Exception:
        _state.dropped += 1


def _waiting(pid):
    """Takes the lines that wait. Other threads only append, so taking the first ones needs no lock."""
    waiting = _state.waiting
    count = len(waiting)
    if not count:
        return ""
    entries = waiting[:count]
    del waiting[:count]
    # A forked child finds those of its parent here, which writes them itself.
    return "".join([_line(*entry) + "}\n" for entry in entries if entry[0] == pid])


def _line(pid, t_ns, name, index, source):
    quoted = _state.quoted
    return '{"t_ns":%d,"name":%s,"index":%s,"rank":%d,"pid":%d,"source":%s' % (
        t_ns,
        quoted.get(name) or _quote(name),
        "null" if index is None else "%d" % index,
        _rank_in(pid),
        pid,
        quoted.get(source) or _quote(source),
    )


def error(framework, exception):
    """Say once per framework that its marks may be incomplete, and why."""
    if framework not in _state.failed:
        _state.failed.add(framework)
        text = "%s: %s" % (type(exception).__name__, exception)
        mark("hook_error", source="hook", detail={"framework": framework, "error": text[:1000]})


def odd(kind, text):
    """Say once per kind that the program marks something that a mark cannot hold as it is."""
    if kind not in _state.failed:
        _state.failed.add(kind)
        mark("odd_mark", source="hook", detail=text)


def learn_rank(rank):
    """Take a rank that was found at run time, unless the environment names one."""
    if not any(name in os.environ for name in (*_RANKS, "SLURM_PROCID")):
        _set_rank(os.getpid(), int(rank))


def rank():
    """Of this process, as its marks have it."""
    return _rank_in(os.getpid())


def rank_of(environ):
    for name in _RANKS:
        value = environ.get(name, "")
        if value.isdigit():
            return int(value)
    # A batch script outside srun has a SLURM_PROCID too, which says nothing about the program.
    tasks, value = environ.get("SLURM_NTASKS", ""), environ.get("SLURM_PROCID", "")
    if tasks.isdigit() and int(tasks) > 1 and value.isdigit():
        return int(value)
    return 0


def _rank_in(pid):
    known = _state.rank
    if known is None or known[0] != pid:
        known = _set_rank(pid, rank_of(os.environ))
    return known[1]


def _set_rank(pid, rank):
    _state.rank = (pid, rank)
    return _state.rank


def _json(value):
    import json

    return json.dumps(value, default=str)


def _quote(text):
    quoted = '"%s"' % text if text.isidentifier() and text.isascii() else _json(text)
    if len(_state.quoted) < 1000:
        _state.quoted[text] = quoted
    return quoted


def _write(pid, data):
    handle = _state.file
    if handle is None or handle[0] != pid or not _ours(handle):
        handle = _open(pid)
    if _state.torn:
        _state.torn = False
        data = b"\n" + data
    if os.write(handle[1], data) != len(data):
        _state.torn = True
        raise OSError("short write")


def _ours(handle):
    # A program may close every descriptor it does not know (daemons do), and get the same number for a file
    # of its own. We would write into that file.
    try:
        status = os.fstat(handle[1])
    except OSError:
        return False
    return status.st_ino == handle[3] and status.st_dev == handle[2]


def _open(pid):
    # No lock: another thread may hold it during a fork, and the child would hang. Two threads that open at
    # once only waste a descriptor. We do not close an inherited descriptor, which may be the program's by
    # now.
    path = os.path.join(_state.spool, "marks-%d.jsonl" % pid)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    status = os.fstat(fd)
    _state.file = (pid, fd, status.st_dev, status.st_ino)
    _state.torn = False
    return _state.file
