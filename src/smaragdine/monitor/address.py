"""Where this machine's daemon is, for those who ask before they load what it takes to talk to it."""

from __future__ import annotations

DEFAULT_SOCKET = "/run/smaragdine/monitor.sock"
ADDRESS_VARIABLE = "SMARAGDINE_DAEMON"
