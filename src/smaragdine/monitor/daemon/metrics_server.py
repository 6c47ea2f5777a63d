"""GET /metrics: just enough HTTP for Prometheus, and nothing a stranger on the network can hold up.

The text is made at most once a second, however often it is asked for: package power at a finer grain would
tell what others compute (CVE-2020-8694).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

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
                # Until they close: what is still on its way to them would be lost by a reset.
                while await reader.read(_HEAD_BYTES):
                    pass
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            connections.discard(writer)
            writer.transport.abort()

    return await asyncio.start_server(connected, host or None, port, limit=_HEAD_BYTES)


def refreshed(render: Callable[[], str], mono_s: Callable[[], float]) -> Callable[[], str]:
    """The same text for a second."""
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
