"""What a user did or has that we cannot work with: one line, exit code 2, no traceback."""

from __future__ import annotations

import signal


class UserError(Exception):
    """`what` went wrong, `why`, and what `remedy` there is. Printed as one line on stderr."""

    def __init__(self, what: str, why: str = "", remedy: str = "") -> None:
        self.reason = " ".join(f"{what}: {why}".split() if why else what.split())
        self.remedy = " ".join(remedy.split())
        super().__init__(f"{self.reason}. {self.remedy}" if remedy else self.reason)


def signal_name(number: int) -> str:
    """SIGKILL; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
