"""Every option of the daemon, and which ones it refuses before it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from smaragdine.errors import UserError
from smaragdine.monitor.contract import DEFAULT_SOCKET

GROUP = "smaragdine"
# Only root gets package counters finer than this: they tell what others' programs compute (CVE-2020-8694).
COARSE_NS = 100_000_000


@dataclass(frozen=True)
class Bounds:
    """How much clients may take up, each and together."""

    connections: int = 512
    connections_per_user: int = 128
    tcp_connections: int = 128  # in addition: strangers must not take the places of this machine's users
    stranger_s: float = 10.0  # within this time a peer at the TCP port shows a valid token, or goes
    sessions: int = 512
    sessions_per_user: int = 128
    readers: int = 512  # calls of Read at a time
    readers_per_user: int = 128
    ended_sessions: int = 1024  # beyond it the oldest go first, of whoever has the most
    forget_s: float = 600.0
    request_bytes: int = 65536
    unread_bytes: int = 8 << 20  # a peer that leaves more of our answers unread is cut off
    request_s: float = 10.0  # for a call to send its whole request
    keepalive_s: float = 30.0  # after this silence we ask a peer whether it lives
    keepalive_timeout_s: float = 20.0


@dataclass(frozen=True)
class Settings:
    socket: Path = Path(DEFAULT_SOCKET)
    group: str = ""  # may read; empty: `smaragdine` where there is one, else root's
    control_group: str = ""  # may set limits besides root
    user: str = ""  # whom to become once the sensors are open; empty: as privilege.py chooses
    state: Path | None = Path("/var/lib/smaragdine")
    listen: tuple[str, int] | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tokens: Path | None = None
    prometheus: tuple[str, int] | None = None
    period_ms: float = 4.0  # for sessions that do not ask for one
    memory_bytes: int = 16 << 20
    spool_bytes: int = 256 << 20
    drain_s: float = 0.1
    bounds: Bounds = field(default_factory=Bounds)

    def check(self) -> None:
        """Refuse what would be unsafe or cannot work."""
        if self.listen is None:
            for option, value in (("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key)):
                if value is not None:
                    raise UserError(f"{option} is for TCP", remedy="Give --listen HOST:PORT with it")
            return
        missing = [
            option
            for option, value in (
                ("--tls-cert", self.tls_cert),
                ("--tls-key", self.tls_key),
                ("--tokens", self.tokens),
            )
            if value is None
        ]
        if missing:
            raise UserError(
                "--listen needs TLS and tokens",
                f"missing: {', '.join(missing)}",
                "Whoever can reach a TCP port could otherwise read and set what they like; "
                "on one machine the Unix socket needs none of it",
            )


def parse_endpoint(text: str, default_host: str) -> tuple[str, int]:
    """HOST:PORT, [IPV6]:PORT, or :PORT for `default_host`."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UserError(f"{text!r} is no address to listen at", remedy="It is HOST:PORT, or :PORT")
    return host.removeprefix("[").removesuffix("]") or default_host, int(port)
