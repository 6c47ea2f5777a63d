"""The contract's calls: from messages to the daemon and back. A refusal is a status and one line."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from google.protobuf.message import DecodeError
from grpclib.const import Cardinality, Status
from grpclib.const import Handler as MethodHandler
from grpclib.exceptions import GRPCError, StreamTerminatedError
from h2.exceptions import H2Error

from smaragdine.daemon.callers import Caller, CredentialFile
from smaragdine.daemon.core import Daemon
from smaragdine.daemon.lease_calls import LeaseCalls
from smaragdine.daemon.log import Batch
from smaragdine.daemon.running_energy import DeviceUse
from smaragdine.daemon.server import Connection
from smaragdine.daemon.sessions import Refused, Session
from smaragdine.daemon.settings import COARSE_NS
from smaragdine.daemon.views import PROVENANCES, channel_message, encode_columns, note_message
from smaragdine.monitor.contract import monitor_pb2 as pb
from smaragdine.monitor.contract.service import METHODS, Method
from smaragdine.system import out_of_files
from smaragdine.version import __version__

_READ_EVERY_S = 1.0
_READ_LEAST_S = 0.1
_MOST_ROWS = 32768  # of one message: far below the 4 MB that gRPC clients take
_MOST_BATCHES = 256
_NO_FILES = "the daemon has no descriptor left, there are so many connections. Try again"


_Answer = Callable[[Connection, Caller, Any], Awaitable[Any]]


class Service:
    def __init__(self, daemon: Daemon, lease_calls: LeaseCalls, tokens: CredentialFile | None = None) -> None:
        self._daemon = daemon
        self._lease_calls = lease_calls
        self._tokens = tokens
        self._readers: Counter[str] = Counter()

    def methods(self, connection: Connection) -> dict[str, MethodHandler]:
        """All calls of one connection, as grpclib wants them."""
        return {
            method.path: MethodHandler(
                functools.partial(self._handle, method, connection),
                Cardinality.UNARY_STREAM if method.streams else Cardinality.UNARY_UNARY,
                method.request,
                method.response,
            )
            for method in METHODS.values()
        }

    async def _handle(self, method: Method, connection: Connection, stream: Any) -> None:
        try:
            caller = self._caller(connection, stream.metadata)
            request = await self._receive(stream)
            if self._daemon.stopping:
                raise _stopping()
            if method.streams:
                still = functools.partial(self._caller, connection, stream.metadata)
                with self._one_more_reader(caller):
                    await self._read(caller, request, stream.send_message, still)
                return
            answer: Callable[[Connection, Caller, Any], Awaitable[Any]] = getattr(
                self, f"_{method.name.lower()}"
            )
            await stream.send_message(await answer(connection, caller, request))
        except Refused as refused:
            raise GRPCError(Status[refused.status], " ".join(refused.line.split())) from None
        except (GRPCError, StreamTerminatedError, H2Error, ConnectionError):
            raise  # the peer or the call has gone
        except Exception as error:
            if connection.closed:
                return
            if out_of_files(error):
                raise GRPCError(Status.RESOURCE_EXHAUSTED, _NO_FILES) from None
            self._daemon.say(f"{method.name} failed: {type(error).__name__}: {error}")
            raise GRPCError(Status.INTERNAL, "the daemon made a mistake, which is in its log") from None

    async def _receive(self, stream: Any) -> Any:
        try:
            async with asyncio.timeout(self._daemon.settings.bounds.request_s):
                request = await stream.recv_message()
        except TimeoutError:
            raise Refused("DEADLINE_EXCEEDED", "the request did not come") from None
        except (DecodeError, AssertionError, NotImplementedError, ValueError):
            request = None
        if request is None:
            raise Refused("INVALID_ARGUMENT", "the request is not a message of this contract")
        return request

    def _caller(self, connection: Connection, metadata: Any) -> Caller:
        caller = connection.caller
        if caller is None:
            word = metadata.get("authorization", "") if metadata is not None else ""
            caller = self._tokens.caller(word) if self._tokens is not None and isinstance(word, str) else None
            if caller is None:
                what = "the token is unknown or has expired" if word else "a token is needed"
                raise Refused("UNAUTHENTICATED", f"{what}. The daemon's operator makes one with --new-token")
            connection.is_known = True
        if not caller.may_read:
            line = (
                f"{caller.user} may not use this daemon. Its operator adds users to the group of its socket"
            )
            raise Refused("PERMISSION_DENIED", line)
        return caller

    async def _describe(self, connection: Connection, caller: Caller, request: Any) -> Any:
        daemon = self._daemon
        channels = daemon.machine_channels(caller).items()
        absent = daemon.knowledge.absent
        return pb.DescribeResponse(
            version=__version__,
            channels=[channel_message(number, c, not caller.is_root, 0.0) for number, c in channels],
            absent=[pb.Absent(channel=a.channel, reason=a.reason, remedy=a.remedy) for a in absent],
            facts_json=json.dumps(daemon.knowledge.facts, default=str),
            limits=await self._lease_calls.ranges(),
            may_control=caller.may_control,
            finest_counter_ms=0.0 if caller.is_root else COARSE_NS / 1e6,
        )

    async def _start(self, connection: Connection, caller: Caller, request: pb.StartRequest) -> Any:
        session = await self._daemon.start(
            caller, request.pid, request.period_ms, request.job, request.include_past
        )
        return pb.StartResponse(
            session_id=session.id,
            sequence=session.sequence,
            begin_ns=session.begin_ns,
            channels=self._channel_messages(caller, session),
            period_ms=session.period_ns / 1e6,
        )

    async def _stop(self, connection: Connection, caller: Caller, request: pb.StopRequest) -> Any:
        session = self._daemon.table.get(caller, request.session_id)
        self._daemon.stop(session)
        return pb.StopResponse(
            end_ns=session.end_ns, energies=_energies(session.energies), sequence=session.end_sequence
        )

    async def _list(self, connection: Connection, caller: Caller, request: pb.ListRequest) -> Any:
        if request.session_id:
            session = self._daemon.table.get(caller, request.session_id)
            message = self._session_message(session)
            message.channels.extend(self._channel_messages(caller, session))
            return pb.ListResponse(sessions=[message])
        sessions = self._daemon.table.sessions.values()
        mine = [s for s in sessions if s.begin_ns and (caller.is_root or s.uid == caller.uid)]
        return pb.ListResponse(sessions=[self._session_message(session) for session in mine])

    def _session_message(self, session: Session) -> pb.Session:
        return pb.Session(
            session_id=session.id,
            pid=session.pid,
            uid=session.uid,
            user=session.user,
            period_ms=session.period_ns / 1e6,
            job=session.job,
            slurm_job_id=session.slurm_job_id,
            begin_ns=session.begin_ns,
            end_ns=session.end_ns,
            sequence=session.sequence,
            energies=_energies(self._daemon.energies(session)),
            dropped_batches=session.dropped_batches,
        )

    def _channel_messages(self, caller: Caller, session: Session) -> list[pb.Channel]:
        return [
            channel_message(number, channel, not caller.is_root, session.period_ns / 1e6)
            for number, channel in self._daemon.visible(caller, session).items()
        ]

    async def _setlimit(self, connection: Connection, caller: Caller, request: Any) -> Any:
        return await self._lease_calls.set_limit(connection, caller, request)

    async def _release(self, connection: Connection, caller: Caller, request: Any) -> Any:
        return await self._lease_calls.release(caller, request)

    async def _health(self, connection: Connection, caller: Caller, request: Any) -> Any:
        daemon = self._daemon
        return pb.HealthResponse(
            ok=not daemon.log.trouble,
            version=__version__,
            begin_ns=daemon.begin_ns,
            sessions=len(daemon.table.live),
            cpu_s=time.process_time(),
            memory_bytes=daemon.memory_bytes(),
            notes=[note_message(note) for note in daemon.notes],
            kept_batches=daemon.log.kept_batches,
            leases=self._lease_calls.count,
        )

    @contextlib.contextmanager
    def _one_more_reader(self, caller: Caller) -> Iterator[None]:
        """Count a reader. Each costs us time ten times a second, so only so many may read."""
        bounds, own = self._daemon.settings.bounds, self._readers[caller.key]
        most = bounds.readers if caller.is_root else bounds.readers_per_user
        if own >= most or (self._daemon.readers >= bounds.readers and not caller.is_root):
            line = (
                f"{own} calls of {caller.user} read here, of {self._daemon.readers}, and no more are allowed"
            )
            raise Refused("RESOURCE_EXHAUSTED", line)
        self._readers[caller.key] += 1
        self._daemon.readers += 1
        try:
            yield
        finally:
            self._daemon.readers -= 1
            self._readers[caller.key] -= 1
            if not self._readers[caller.key]:
                del self._readers[caller.key]

    async def _read(
        self,
        caller: Caller,
        request: pb.ReadRequest,
        send: Callable[[Any], Awaitable[None]],
        still: Callable[[], object] = lambda: None,
    ) -> None:
        daemon = self._daemon
        session = daemon.table.get(caller, request.session_id)
        every_s = _every_s(request.every_ms)
        cursor = max(request.sequence, session.sequence)
        if cursor > (session.end_sequence or daemon.log.next_sequence):
            raise Refused("INVALID_ARGUMENT", f"there is no sequence number {cursor} yet")
        view = daemon.view(caller, session)
        while True:
            still()  # a token may have expired meanwhile
            end = session.end_sequence or daemon.log.next_sequence
            seen: list[Batch] = []
            rows = dropped = 0
            while cursor < end and rows < _MOST_ROWS and len(seen) < _MOST_BATCHES:
                batch = daemon.log.read(cursor)
                found = min(batch.sequence, end) if batch is not None else end
                dropped += found - cursor
                cursor = found
                if batch is not None and found < end:
                    seen.append(view.see(batch))
                    rows += len(seen[-1].t_ns)
                    cursor += 1
            last = session.ended and cursor >= session.end_sequence
            if seen or dropped or last:
                session.dropped_batches += dropped
                daemon.dropped_batches += dropped
                await send(_read_response(cursor, seen, dropped, session.end_reason if last else ""))
            if last:
                return
            if cursor < (session.end_sequence or daemon.log.next_sequence):
                await asyncio.sleep(0)  # others want their turn
            elif daemon.stopping:
                raise _stopping()
            elif not request.follow:
                return
            else:
                await _pause(session, every_s)


def _stopping() -> Refused:
    return Refused("UNAVAILABLE", "the daemon is stopping. Try again")


def _every_s(every_ms: float) -> float:
    if not (every_ms == 0 or _READ_LEAST_S * 1e3 <= every_ms <= 3_600_000):
        raise Refused("INVALID_ARGUMENT", "every_ms is between 100 and 3600000")
    return every_ms / 1e3 if every_ms else _READ_EVERY_S


async def _pause(session: Session, seconds: float) -> None:
    """Wait for a while, or until the session ends or the daemon stops."""
    try:
        async with asyncio.timeout(seconds):
            await session.wake.wait()
    except TimeoutError:
        pass


def _read_response(cursor: int, seen: list[Batch], dropped: int, end_reason: str) -> bytes:
    head = pb.ReadResponse(
        next_sequence=cursor,
        notes=[note_message(note) for batch in seen for note in batch.notes],
        dropped_batches=dropped,
        ended=bool(end_reason),
        end_reason=end_reason,
    )
    return head.SerializeToString() + encode_columns(seen)


def _energies(energies: list[DeviceUse]) -> list[pb.DeviceEnergy]:
    return [
        pb.DeviceEnergy(
            device=energy.device,
            energy_j=energy.energy_j,
            own_j=energy.own_j,
            provenance=PROVENANCES[energy.provenance],
            basis=energy.basis,
        )
        for energy in energies
    ]
