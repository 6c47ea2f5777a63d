"""`smaragdine session`: lets the daemon record a program that is already running."""

from __future__ import annotations

import csv
import json
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

from smaragdine.cli.parsing import Parser, count, period_ms
from smaragdine.errors import UserError, visible
from smaragdine.monitor.client import connect
from smaragdine.monitor.contract import DEFAULT_SOCKET
from smaragdine.units import joules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smaragdine.monitor.client import Client
    from smaragdine.monitor.contract import monitor_pb2 as pb

_HELP = """\
usage: smaragdine session start | stop | read | list  [options]

Let the daemon record the energy of a program that is already running. A session ends with the program.

  start --pid N   record a process and all it starts; prints the session's id
  list            your sessions, and what they used so far; everybody's for root
  read ID         print readings; with --follow as they come
  stop ID         end a session, and say what was used

  smaragdine session start --help    the options of each, with an example
"""


def main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    verb = _VERBS.get(words[0])
    if verb is None:
        raise UserError(f"unknown verb session {words[0]}", remedy=f"There are: {', '.join(_VERBS)}")
    return verb(words[1:])


def _parser(verb: str, description: str, example: str) -> Parser:
    parser = Parser(f"session {verb}", description, example)
    parser.add_argument(
        "--daemon", metavar="ADDRESS", help=f"its socket, or HOST:PORT ($SMARAGDINE_DAEMON, {DEFAULT_SOCKET})"
    )
    return parser


def _start(words: list[str]) -> int:
    parser = _parser(
        "start",
        "Record a process and all it starts. Prints the session's id.",
        "  smaragdine session start --pid 1234 --period-ms 10 --job bert",
    )
    parser.add_argument("--pid", type=count, required=True, help="the process")
    parser.add_argument("--period-ms", type=period_ms, default=0.0, help="how often to read counters (4)")
    parser.add_argument("--job", default="", help="a name for fleet metrics: letters, digits and ._-")
    parser.add_argument("--include-past", action="store_true", help="also count CPU time from before")
    parser.add_argument("--json", action="store_true", help="print JSON, with the channels")
    options = parser.parse_args(words)
    if options.pid == 0:
        raise UserError("0 is no process")
    with connect(options.daemon) as daemon:
        started = daemon.start(options.pid, options.period_ms, options.job, options.include_past)
    if options.json:
        _print_json(_as_dict(started))
    else:
        print(started.session_id)
    return 0


def _stop(words: list[str]) -> int:
    parser = _parser("stop", "End a session and say what was used.", "  smaragdine session stop 1f0c7a92be44")
    parser.add_argument("id", metavar="ID", help="as `session start` and `session list` print it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    with connect(options.daemon) as daemon:
        stopped = daemon.stop(options.id)
    if options.json:
        _print_json(_as_dict(stopped))
        return 0
    from smaragdine.report.terminal import console, plain_table

    table = plain_table("device", "energy", "own share", "", left=("",))
    for energy in stopped.energies:
        table.add_row(energy.device, joules(energy.energy_j), _own(energy), _provenance(energy))
    console().print(table)
    return 0


def _read(words: list[str]) -> int:
    parser = _parser(
        "read",
        "Readings of a session, as CSV: time (ns since the Unix epoch), device, quantity, value, unit.",
        "  smaragdine session read 1f0c7a92be44 > readings.csv\n"
        "  smaragdine session read 1f0c7a92be44 --follow --json",
    )
    parser.add_argument("id", metavar="ID")
    parser.add_argument("--follow", action="store_true", help="continue until the session ends")
    parser.add_argument("--sequence", metavar="N", type=count, default=0, help="begin with this batch")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, one batch per line")
    form.add_argument("--csv", action="store_true", help="print CSV (default)")
    options = parser.parse_args(words)
    with connect(options.daemon) as daemon:
        names = _channels(daemon, options.id)
        batches = daemon.read(options.id, options.sequence, options.follow)
        if options.json:
            for batch in batches:
                print(json.dumps(_as_dict(batch), ensure_ascii=False), flush=True)
        else:
            _print_csv(batches, names)
    return 0


def _list(words: list[str]) -> int:
    parser = _parser("list", "Your sessions; everybody's for root.", "  smaragdine session list")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    with connect(options.daemon) as daemon:
        sessions = daemon.list()
    if options.json:
        _print_json([_as_dict(session) for session in sessions])
        return 0
    if not sessions:
        print("no sessions")
        return 0
    from smaragdine.report.terminal import console, plain_table

    heads = ("id", "process", "user", "job", "since", "until", "own energy")
    table = plain_table(*heads, left=heads, folds=heads)
    for session in sorted(sessions, key=lambda session: session.begin_ns):
        own = ", ".join(f"{e.device} {_own(e)}" for e in session.energies if e.HasField("own_j"))
        until = _clock_time(session.end_ns) if session.end_ns else ""
        table.add_row(
            session.session_id,
            str(session.pid),
            session.user,
            session.job,
            _clock_time(session.begin_ns),
            until,
            own,
        )
    console().print(table)
    return 0


_VERBS = {"start": _start, "stop": _stop, "read": _read, "list": _list}


_Names = dict[int, tuple[str, str, str]]


def _channels(daemon: Client, session_id: str) -> _Names:
    (session,) = daemon.list(session_id)
    return {c.number: (c.device, c.quantity, c.unit) for c in session.channels}


def _print_csv(batches: Iterable[pb.ReadResponse], names: _Names) -> None:
    from smaragdine.recording.tables import guarded

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["t_ns", "device", "quantity", "value", "unit"])
    for batch in batches:
        if batch.dropped_batches:
            print(f"smaragdine: {batch.dropped_batches} batches are missing", file=sys.stderr)
        for note in batch.notes:
            print(f"smaragdine: {visible(f'{note.name}: {note.detail}')}", file=sys.stderr)
        for t_ns, number, value in zip(batch.t_ns, batch.channel, batch.value, strict=True):
            device, quantity, unit = names[number]
            writer.writerow([t_ns, guarded(device), guarded(quantity), repr(value), guarded(unit)])
        sys.stdout.flush()


def _own(energy: pb.DeviceEnergy) -> str:
    return joules(energy.own_j) if energy.HasField("own_j") else "–"


def _provenance(energy: pb.DeviceEnergy) -> str:
    from smaragdine.monitor.contract import monitor_pb2 as pb

    return pb.Provenance.Name(energy.provenance).removeprefix("PROVENANCE_").lower()


def _clock_time(t_ns: int) -> str:
    return datetime.fromtimestamp(t_ns // 1_000_000_000).isoformat(" ")


def _as_dict(message: Any) -> dict[str, Any]:
    """In the contract's own JSON form, but with numbers as numbers."""
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1, ensure_ascii=False)
    print()
