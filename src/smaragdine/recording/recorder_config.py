"""What a recorder is told when it starts."""

from __future__ import annotations

import signal
from dataclasses import dataclass

# Signals a terminal or a batch system sends to a whole process group.
GROUP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


@dataclass(frozen=True)
class RecorderConfig:
    folder: str
    segment: int = 0
    period_ns: int = 4_000_000
    pcie: bool = False
    live: bool = False
