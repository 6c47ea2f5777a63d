"""`smaragdine daemon`: measures for every user of this machine."""

from __future__ import annotations

import argparse
import getpass
import os
import shlex
import sys
from pathlib import Path

from smaragdine.cli.parsing import Parser, period_ms, positive_count
from smaragdine.daemon.settings import Bounds, Settings, parse_endpoint
from smaragdine.errors import UserError

_EXAMPLE = """\
  sudo smaragdine daemon                      until Ctrl-C; members of the group smaragdine may use it
  smaragdine daemon --systemd | sudo tee /etc/systemd/system/smaragdine.service
  sudo smaragdine daemon --control-group gpu-tuners --prometheus :9402
  sudo smaragdine daemon --new-token ci --tokens /etc/smaragdine/tokens --days 30 --rights read
  sudo smaragdine daemon --listen 0.0.0.0:9401 --tls-cert node.crt --tls-key node.key \\
                         --tokens /etc/smaragdine/tokens"""

_MIB = 1 << 20


def _parser() -> Parser:
    default = Settings()
    parser = Parser(
        "daemon",
        "Measure for every user of this machine: one sampling loop for all, each sees the share of their own "
        "processes. Opens the sensors as root, then runs without privileges.",
        _EXAMPLE,
    )
    who = parser.add_argument_group("who may use it")
    who.add_argument(
        "--socket", metavar="PATH", type=Path, default=default.socket, help=f"its path ({default.socket})"
    )
    who.add_argument(
        "--group", metavar="NAME", default="", help="members may read (smaragdine if it exists, else root)"
    )
    who.add_argument(
        "--control-group", metavar="NAME", default="", help="members may also set limits (only root)"
    )
    network = parser.add_argument_group("over TCP, always with TLS and a token")
    network.add_argument("--listen", metavar="HOST:PORT", help="where to listen")
    network.add_argument("--tls-cert", metavar="FILE", type=Path, help="the certificate, PEM")
    network.add_argument("--tls-key", metavar="FILE", type=Path, help="its key, PEM")
    network.add_argument(
        "--tokens", metavar="FILE", type=Path, help="tokens of those who may call; read again when it changes"
    )
    network.add_argument("--new-token", metavar="NAME", help="make a token, print it once, and exit")
    network.add_argument("--token-user", metavar="USER", help="the local user it acts as (you)")
    network.add_argument("--days", type=_days, default=30.0, help="how long it is valid (30)")
    network.add_argument("--rights", default="read", help="read, or read,control (read)")
    network.add_argument(
        "--prometheus", metavar="[HOST]:PORT", help="serve metrics for a fleet, by plain HTTP"
    )
    running = parser.add_argument_group("running")
    running.add_argument(
        "--user", metavar="NAME", default="", help="run as this user (smaragdine if it exists, else nobody)"
    )
    state_help = f"where it keeps what a restart needs ({default.state})"
    running.add_argument("--state", metavar="DIR", type=Path, default=default.state, help=state_help)
    running.add_argument(
        "--no-state", action="store_true", help="keep nothing on disk: a restart forgets everything"
    )
    running.add_argument(
        "--period-ms", type=period_ms, default=4.0, help="for sessions that do not choose (4)"
    )
    running.add_argument(
        "--memory-mib",
        type=positive_count,
        default=16,
        help="keep so many of the newest readings in memory (16)",
    )
    running.add_argument(
        "--spool-mib", type=positive_count, default=256, help="keep so many more on disk (256)"
    )
    running.add_argument(
        "--most-sessions",
        metavar="N",
        type=positive_count,
        default=Bounds().sessions,
        help="altogether (512)",
    )
    running.add_argument(
        "--most-sessions-per-user",
        metavar="N",
        type=positive_count,
        default=Bounds().sessions_per_user,
        help="(128)",
    )
    parser.add_argument(
        "--systemd", action="store_true", help="print a systemd unit with these options, and exit"
    )
    return parser


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    if options.new_token is not None:
        return _new_token(options)
    settings = _settings(options)
    settings.check()
    if options.systemd:
        from smaragdine.daemon.unit import unit_text

        kept = _absolute([word for word in words if word != "--systemd"])
        # Also if it was started as `python -m smaragdine`.
        beside = Path(sys.executable).with_name("smaragdine")
        print(unit_text(str(beside if beside.exists() else Path(sys.argv[0]).absolute()), kept), end="")
        return 0
    from smaragdine.daemon.main import run

    return run(settings)


_FILES = ("--socket", "--state", "--tls-cert", "--tls-key", "--tokens")


def _absolute(words: list[str]) -> list[str]:
    """The same options with absolute paths, for a service that starts in another folder."""
    result: list[str] = []
    for word in words:
        option, equals, value = word.partition("=")
        if equals and option in _FILES:
            word = f"{option}={os.path.abspath(value)}"
        elif result and result[-1] in _FILES:
            word = os.path.abspath(word)
        result.append(word)
    return result


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        socket=Path(os.path.abspath(options.socket)),
        group=options.group,
        control_group=options.control_group,
        user=options.user,
        state=None if options.no_state else Path(os.path.abspath(options.state)),
        listen=parse_endpoint(options.listen, "") if options.listen else None,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        tokens=options.tokens,
        prometheus=parse_endpoint(options.prometheus, "") if options.prometheus else None,
        period_ms=options.period_ms,
        memory_bytes=options.memory_mib * _MIB,
        spool_bytes=options.spool_mib * _MIB,
        bounds=Bounds(sessions=options.most_sessions, sessions_per_user=options.most_sessions_per_user),
    )


def _new_token(options: argparse.Namespace) -> int:
    from smaragdine.daemon.callers import add_token

    if options.tokens is None:
        raise UserError("--new-token needs a file for it", remedy="Give --tokens FILE")
    user = options.token_user or os.environ.get("SUDO_USER") or getpass.getuser()
    rights = frozenset(options.rights.split(","))
    token = add_token(options.tokens, options.new_token, user, options.days, rights)
    print(token)
    what = f"acts as {user}, valid for {options.days:g} days, may {' and '.join(sorted(rights))}"
    print(f"smaragdine: {options.new_token}: {what}; it is not shown again", file=sys.stderr)
    print(f"smaragdine: use it with export SMARAGDINE_DAEMON_TOKEN={shlex.quote('…')}", file=sys.stderr)
    return 0


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days <= 3650:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days from above 0 to 3650")
    return days
