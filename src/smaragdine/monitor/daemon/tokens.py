"""Tokens for callers over TCP: a file of hashes, so that whoever reads it can use none of them.

One line each: NAME USER EXPIRES RIGHTS SHA256. The caller acts as that USER of this machine.
"""

from __future__ import annotations

import hashlib
import hmac
import pwd
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from smaragdine.errors import UserError
from smaragdine.monitor.daemon.callers import Caller, Owner
from smaragdine.whole import write_whole

RIGHTS = ("read", "control")
_HEAD = "# smaragdine tokens: NAME USER EXPIRES RIGHTS SHA256"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,63}")
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Token:
    name: str
    user: str
    uid: int
    expires_s: float
    rights: frozenset[str]
    digest: bytes


def parse_tokens(text: str) -> tuple[list[Token], list[str]]:
    """The tokens of a file, and a line for each entry that makes no sense: such a one opens nothing."""
    tokens: list[Token] = []
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
                Token(name, user, pwd.getpwnam(user).pw_uid, expires_at.timestamp(), granted, hashed)
            )
        except (ValueError, KeyError) as error:
            wrong.append(f"line {number}: {error}")
    return tokens, wrong


class TokenFile:
    """The tokens of a file, read again when it changes. A file that is gone opens nothing."""

    def __init__(
        self, path: Path, say: Callable[[str], None], now_s: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._say = say
        self._now_s = now_s
        self._seen: tuple[int, int, int] | None = None
        self._tokens: list[Token] = []
        self._refresh()

    def caller(self, authorization: str) -> Caller | None:
        """Who holds this `Bearer …`; None for nobody, and for one whose time is over."""
        self._refresh()
        kind, _, secret = authorization.partition(" ")
        digest = hashlib.sha256(secret.strip().encode("utf-8", "replace")).digest()
        found: Token | None = None
        for token in self._tokens:
            # No early end: how long it takes tells nothing.
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
    """Put a new token into the file, in place of an old one of that name; returns it, this once."""
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
        # Hashes of random secrets need not be hidden, and the daemon may be another user.
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
