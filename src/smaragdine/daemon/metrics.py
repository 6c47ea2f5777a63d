"""Fleet metrics: what this node's devices and jobs have used, as Prometheus' text.

Every total only grows. The series of a job lives on for a while after its last session, so that its end is
scraped. Then it goes; its energy is not counted again elsewhere. Only so many jobs at a time have a series of
their own. Sessions of further jobs count for job="(other)" as long as they live.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from smaragdine.daemon.totals import RunningTotal
from smaragdine.version import __version__

if TYPE_CHECKING:
    from smaragdine.daemon.core import Daemon
    from smaragdine.daemon.lease_calls import LeaseCalls

# GET /metrics: just enough HTTP for Prometheus, and nothing that a stranger on the network can hold up.
# However often it is asked for, we make the text at most once a second: finer package power would tell what
# others compute (CVE-2020-8694).

REFRESH_S = 1.0
_HEAD_BYTES = 8192
_PATIENCE_S = 5.0
_MOST_CONNECTIONS = 32
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_PAGE = (
    "<!doctype html><title>Smaragdine</title>"
    '<p>Smaragdine: energy of this node&rsquo;s devices and jobs. <a href="/metrics">Metrics</a></p>\n'
)


async def serve_metrics(
    host: str,
    port: int,
    render: Callable[[], str],
    *,
    patience_s: float = _PATIENCE_S,
    mono_s: Callable[[], float] = time.monotonic,
) -> asyncio.Server:
    """Listen on `host` (empty: every address) and answer with what `render` gives. Close it to end."""
    text = refreshed(render, mono_s)
    connections: set[asyncio.StreamWriter] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        try:
            if len(connections) > _MOST_CONNECTIONS:
                return
            async with asyncio.timeout(patience_s):
                writer.write(_answer(await _head(reader), text))
                await writer.drain()
                writer.write_eof()
                # Read until they close: a reset would lose what is still on its way to them.
                while await reader.read(_HEAD_BYTES):
                    pass
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            connections.discard(writer)
            writer.transport.abort()

    return await asyncio.start_server(connected, host or None, port, limit=_HEAD_BYTES)


def refreshed(render: Callable[[], str], mono_s: Callable[[], float]) -> Callable[[], str]:
    """Gives the same text for a second."""
    made: tuple[float, str] | None = None

    def text() -> str:
        nonlocal made
        now_s = mono_s()
        if made is None or now_s - made[0] >= REFRESH_S:
            made = (now_s, render())
        return made[1]

    return text


async def _head(reader: asyncio.StreamReader) -> bytes:
    """The request up to its empty line; empty where it is too long."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return b""


def _answer(head: bytes, text: Callable[[], str]) -> bytes:
    if not head:
        return _response("431 Request Header Fields Too Large", "the request is too long\n")
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return _response("400 Bad Request", "this is no HTTP request\n")
    method, target, _ = words
    if method not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed", "only GET\n", more="Allow: GET, HEAD\r\n")
    path = target.split(b"?", 1)[0]
    if path == b"/metrics":
        try:
            response = _response("200 OK", text(), _TEXT)
        except Exception:
            # The next scrape may do better; the daemon's own work must not suffer.
            response = _response("500 Internal Server Error", "the metrics could not be made\n")
    elif path == b"/":
        response = _response("200 OK", _PAGE, "text/html; charset=utf-8")
    else:
        response = _response("404 Not Found", "there is only /metrics\n")
    return response if method == b"GET" else response[: response.index(b"\r\n\r\n") + 4]


def _response(status: str, text: str, kind: str = "text/plain; charset=utf-8", more: str = "") -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + body


OTHER = "(other)"  # no user can name a job so
MOST_JOBS = 100
KEPT_S = 900.0
SHORTEST_KEPT_S = 120.0  # where others need the room: one scrape a minute still sees its end

_SLURM_JOB = re.compile(r":/(?:[^/]*/)*?[^/]*slurm[^/]*/(?:[^/]*/)*?job_(\d+)(?:/|$)", re.MULTILINE)


@dataclass(frozen=True)
class SessionEnergy:
    """What a session used of each device. Its processes count for no other session."""

    session_id: str
    job: str
    user: str
    slurm_job_id: str
    own_exclusive_j: Mapping[tuple[str, str], float]  # (device, provenance) → energy since it began
    ended: bool = False


@dataclass(frozen=True)
class DaemonHealth:
    begin_s: float  # Unix time
    cpu_s: float
    memory_bytes: int
    sensors_up: Mapping[tuple[str, str], bool]  # (device, quantity)
    dropped_batches: int = 0
    kept_batches: int = 0
    leases: int = 0
    missed_readings: int = 0


@dataclass(frozen=True)
class SeriesLabels:
    """The labels of a series."""

    name: str
    user: str
    slurm_job_id: str


Labelled = tuple[Mapping[str, str], float]
_OTHERS = SeriesLabels(OTHER, "", "")


@dataclass
class _Series:
    seen_s: float
    energy_j: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])


@dataclass
class _Following:
    """How much of a session has been counted, and for which series. It keeps that series for life."""

    job: SeriesLabels
    counted_j: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])


class Fleet:
    """Running totals over all sessions ever. `update` it every second or so, scraped or not."""

    def __init__(self, most_jobs: int = MOST_JOBS, kept_s: float = KEPT_S) -> None:
        self._most_jobs = most_jobs
        self._kept_s = kept_s
        self._jobs: dict[SeriesLabels, _Series] = {}
        self._sessions: dict[str, _Following] = {}
        self._devices: dict[str, RunningTotal] = {}
        self._live = 0
        self._started = 0

    def take_up(self, now_s: float, sessions: Iterable[SessionEnergy]) -> None:
        """Take sessions from before a restart: what they had used was counted and scraped then."""
        for session in sessions:
            following = self._follow(now_s, session)
            following.counted_j.update(session.own_exclusive_j)

    def update(
        self, now_s: float, devices: Iterable[RunningTotal], sessions: Iterable[SessionEnergy]
    ) -> None:
        """`now_s` is monotonic. A session that has ended may stay in the list or leave it."""
        for device in devices:
            before = self._devices.get(device.device)
            energy_j = max(device.energy_j, before.energy_j if before else 0.0)
            self._devices[device.device] = replace(device, energy_j=energy_j)
        shown: set[str] = set()
        self._live = 0
        for session in sessions:
            shown.add(session.session_id)
            self._live += not session.ended
            self._count(now_s, session)
        for gone in self._sessions.keys() - shown:
            del self._sessions[gone]
        self._forget(now_s, self._kept_s)

    def text(self, health: DaemonHealth) -> str:
        jobs = [(job, series.energy_j) for job, series in self._jobs.items()]
        return render(self._devices.values(), jobs, self._live, self._started, health)

    def _count(self, now_s: float, session: SessionEnergy) -> None:
        following = self._sessions.get(session.session_id)
        if following is None:
            following = self._follow(now_s, session)
            self._started += 1
        series = self._jobs[following.job]
        if not session.ended:
            series.seen_s = now_s
        for key, energy_j in session.own_exclusive_j.items():
            before_j = following.counted_j.get(key, 0.0)
            # A share may turn out to have been smaller. That does not take a total back.
            if energy_j > before_j:
                following.counted_j[key] = energy_j
                series.energy_j[key] = series.energy_j.get(key, 0.0) + energy_j - before_j
            else:
                series.energy_j.setdefault(key, 0.0)

    def _follow(self, now_s: float, session: SessionEnergy) -> _Following:
        job = SeriesLabels(session.job, session.user, session.slurm_job_id)
        if job not in self._jobs and not self._room(now_s):
            job = _OTHERS
        following = self._sessions[session.session_id] = _Following(job)
        self._jobs.setdefault(job, _Series(now_s))
        return following

    def _room(self, now_s: float) -> bool:
        def full() -> bool:
            return len(self._jobs.keys() - {_OTHERS}) >= self._most_jobs

        if full():
            self._forget(now_s, min(SHORTEST_KEPT_S, self._kept_s))
        return not full()

    def _forget(self, now_s: float, kept_s: float) -> None:
        shown = {following.job for following in self._sessions.values()} | {_OTHERS}
        for job, series in list(self._jobs.items()):
            if job not in shown and now_s - series.seen_s > kept_s:
                del self._jobs[job]


def render(
    devices: Iterable[RunningTotal],
    jobs: Iterable[tuple[SeriesLabels, Mapping[tuple[str, str], float]]],
    sessions: int,
    started: int,
    health: DaemonHealth,
) -> str:
    devices = list(devices)

    def labels(device: RunningTotal) -> dict[str, str]:
        return {"device": device.device, "provenance": device.provenance, "scope": device.scope}

    shares = [
        (
            {
                "device": device,
                "job": job.name,
                "user": job.user,
                "slurm_job_id": job.slurm_job_id,
                "provenance": provenance,
            },
            energy_j,
        )
        for job, energies in jobs
        for (device, provenance), energy_j in energies.items()
    ]
    up = [
        ({"device": device, "quantity": quantity}, float(works))
        for (device, quantity), works in health.sensors_up.items()
    ]
    families: tuple[tuple[str, str, str, float | Sequence[Labelled]], ...] = (
        ("build_info", "gauge", "The daemon.", [({"version": __version__}, 1.0)]),
        (
            "device_energy_joules_total",
            "counter",
            "Energy of a device since it was first read. Only those of scope device add up.",
            [(labels(device), device.energy_j) for device in devices],
        ),
        (
            "device_power_watts",
            "gauge",
            "Mean power of a device over the last second or more.",
            [(labels(device), device.power_w) for device in devices if device.power_w is not None],
        ),
        (
            "session_energy_joules_total",
            "counter",
            "A job's own share of a device's energy; no process counts twice, so jobs add up to at most it.",
            shares,
        ),
        ("sessions", "gauge", "Sessions that go on.", sessions),
        ("sessions_started_total", "counter", "Sessions since the daemon started.", started),
        ("sensor_up", "gauge", "Whether a channel gives readings.", up),
        ("limit_leases", "gauge", "Limits that are changed on loan now.", health.leases),
        ("log_batches", "gauge", "Batches of readings that can be read.", health.kept_batches),
        (
            "log_dropped_batches_total",
            "counter",
            "Batches that were dropped before a session had read them.",
            health.dropped_batches,
        ),
        (
            "missed_readings_total",
            "counter",
            "Readings that could not be made in time.",
            health.missed_readings,
        ),
        ("daemon_cpu_seconds_total", "counter", "CPU time of the daemon.", health.cpu_s),
        ("daemon_memory_bytes", "gauge", "Resident memory of the daemon.", health.memory_bytes),
        ("daemon_start_time_seconds", "gauge", "When the daemon started, in Unix time.", health.begin_s),
    )
    return "".join(_family(*each) for each in families)


class FleetMetrics:
    """Updates the fleet's totals every second, so that no session between two scrapes is lost."""

    def __init__(self, daemon: Daemon, lease_calls: LeaseCalls) -> None:
        self._daemon = daemon
        self._lease_calls = lease_calls
        self._fleet = Fleet()

    def take_up(self) -> None:
        """Take sessions from before a restart: what they had used has been counted."""
        self._fleet.take_up(time.monotonic(), self._sessions())

    def update(self) -> None:
        self._fleet.update(time.monotonic(), self._daemon.meter.devices(), self._sessions())

    def _sessions(self) -> list[SessionEnergy]:
        daemon = self._daemon
        return [
            SessionEnergy(
                session.id,
                session.job,
                session.user,
                session.slurm_job_id,
                daemon.exclusive_j(session),
                session.ended,
            )
            for session in daemon.table.sessions.values()
            if session.begin_ns
        ]

    def text(self) -> str:
        daemon = self._daemon
        channels = daemon.source.channels.items()
        return self._fleet.text(
            DaemonHealth(
                begin_s=daemon.begin_ns / 1e9,
                cpu_s=time.process_time(),
                memory_bytes=daemon.memory_bytes(),
                sensors_up={(c.device, c.quantity): number not in daemon.lost for number, c in channels},
                missed_readings=sum(lag.missed for lag in daemon.source.sampler.lag.values()),
                dropped_batches=daemon.dropped_batches,
                kept_batches=daemon.log.kept_batches,
                leases=self._lease_calls.count,
            )
        )


def slurm_job_id(pid: int, proc: Path = Path("/proc")) -> str:
    """The Slurm job of a process, from its control group; empty where there is none.

    It is fit for a label only: users who own control groups can name them as they like.
    """
    try:
        text = (proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = _SLURM_JOB.search(text)
    return found[1] if found else ""


def _family(name: str, kind: str, text: str, values: float | Sequence[Labelled]) -> str:
    """One metric, a figure alone or one for each set of labels; nothing where it has no value."""
    if isinstance(values, int | float):
        values = [({}, float(values))]
    if not values:
        return ""
    metric = f"smaragdine_{name}"
    lines = [f"# HELP {metric} {text}", f"# TYPE {metric} {kind}"]
    lines += [f"{metric}{_labels(labels)} {value!r}" for labels, value in values]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str) -> str:
    # One byte that is not UTF-8, and Prometheus refuses the whole scrape.
    whole = text.encode("utf-8", "replace").decode()
    return whole.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
