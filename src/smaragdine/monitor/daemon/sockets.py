"""Sockets to listen at: Unix, for root and a group; TCP with TLS."""

from __future__ import annotations

import os
import socket
import ssl
import stat
from pathlib import Path

from smaragdine.errors import UserError

_BACKLOG = 128


def listen_unix(path: Path, group: int) -> socket.socket:
    """A socket at `path` that root and `group` can connect to. One that a dead daemon left is replaced."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        remove_stale(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # Nobody can connect until the mode and group are right.
            before = os.umask(0o777)
            try:
                sock.bind(os.fspath(path))
            finally:
                os.umask(before)
            os.chown(path, -1, group, follow_symlinks=False)
            os.chmod(path, 0o660)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock
    except OSError as error:
        why = "the path is too long" if "too long" in str(error) else error.strerror or str(error)
        raise UserError(f"no socket at {path}", why, "Name another place with --socket") from None


def remove_stale(path: Path) -> None:
    """Remove a socket that nobody serves; refuse where somebody does."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UserError(
                f"no socket at {path}", "there is a file of that name", "Name another with --socket"
            )
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:
            pass
    raise UserError(f"a daemon serves {path} already", remedy="Stop it, or name another place with --socket")


def listen_tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock
    except OSError as error:
        raise UserError(f"cannot listen at {host}:{port}", error.strerror or str(error)) from None


def tls_context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        what = f"no TLS with {cert} and {key}"
        raise UserError(
            what, error.strerror or str(error), "They are a certificate and its key, as PEM"
        ) from None
    return context
