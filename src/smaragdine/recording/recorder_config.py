"""What a recorder is told when it starts."""

from __future__ import annotations

import signal
from dataclasses import dataclass

# What anybody may send to us and mean the program: all that can be caught, save signs of a fault of our own.
GROUP_SIGNALS: tuple[int, ...] = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGXCPU,
    signal.SIGTSTP,
    signal.SIGCONT,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)


# How long readings go into one file: of two sockets it has half a million of them then.
PIECE_NS = 180_000_000_000


@dataclass(frozen=True)
class RecorderConfig:
    folder: str
    segment: int = 0
    period_ns: int = 4_000_000
    pcie: bool = False
    live: bool = False
    keep_all: bool = False  # of the readings; else old ones are thinned
    piece_ns: int = PIECE_NS
