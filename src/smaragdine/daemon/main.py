"""Puts the daemon together: opens everything as root, gives root up, serves, and ends within a second."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import resource
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from smaragdine.daemon.callers import resolve_rights
from smaragdine.daemon.parent import KEEPER, Parent, run_unprivileged
from smaragdine.daemon.server import listen_tcp, listen_unix, remove_stale, tls_context
from smaragdine.daemon.settings import Settings
from smaragdine.daemon.unit import make_say
from smaragdine.errors import UserError
from smaragdine.limits.journal import DEFAULT_JOURNAL
from smaragdine.limits.keeper_client import keeper_command
from smaragdine.privilege import hand_over

if TYPE_CHECKING:
    from smaragdine.daemon.serving import Prepared


# A daemon writes these to its state folder. We give no folder away that holds anything else (`--state /etc`).
_STATE_FILES = re.compile(r"batches-\d+\.spool|numbers|\.?[a-z]+\.json\w*")


def run(settings: Settings) -> int:
    """Serve until told to end. Returns the exit code."""
    settings.check()
    say = make_say()
    powercap = Path(os.environ.get("SMARAGDINE_POWERCAP_ROOT", "/sys/class/powercap"))
    user = settings.user or None
    try:
        return run_unprivileged(
            lambda: _prepare(settings, user),
            lambda prepared, parent: _serve(settings, prepared, parent, say),
            user=user,
            counters=(powercap,),
            helpers={KEEPER: keeper_command(journal_path(settings))},
            say=lambda words: say(f"runs as {words}"),
        )
    finally:
        # The folder may be root's, so the server could not remove the socket itself.
        with contextlib.suppress(OSError, UserError):
            remove_stale(settings.socket)


def journal_path(settings: Settings) -> Path:
    """The journal lies beside the state folder and not in it, because root gives that one away."""
    if settings.state is None or settings.state == Settings().state:
        return DEFAULT_JOURNAL
    return settings.state.with_name(f"{settings.state.name}-limits") / "journal"


def _prepare(settings: Settings, user: str | None) -> Prepared:
    # One open file per connection, session and watched thread.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    rights = resolve_rights(settings)
    if settings.state is not None:
        try:
            hand_over(settings.state, user, ours=_STATE_FILES)
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError(f"{settings.state} cannot be used", why, "Name another with --state") from None
    tls = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        tls = tls_context(settings.tls_cert, settings.tls_key)
    unix = listen_unix(settings.socket, rights.group)
    tcp = listen_tcp(*settings.listen) if settings.listen is not None else None

    # Load everything now: the server's user may not be able to read it.
    for name in ("smaragdine.daemon.serving", "encodings.idna"):
        import_module(name)
    from smaragdine.daemon.serving import Prepared
    from smaragdine.sensors.discover import discover, settings_from_environment

    sensor_settings = settings_from_environment(os.environ, int(settings.period_ms * 1e6))
    return Prepared(rights, sensor_settings, discover(sensor_settings), unix, tcp, tls)


def _serve(settings: Settings, prepared: Prepared, parent: Parent, say: Callable[[str], None]) -> int:
    from smaragdine.daemon.serving import serve

    # The default of 5 ms would let one call delay a sample by more than the sampling period.
    sys.setswitchinterval(0.0002)
    # What is loaded stays for good. Connections leave garbage in cycles. We look for it rarely, because each
    # look stops the sampling threads for a moment.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 5, 5)
    asyncio.run(serve(settings, prepared, parent, say))
    say("ended")
    return 0
