"""What a user did or has that we cannot work with: one line, exit code 2, no traceback."""

from __future__ import annotations


class UserError(Exception):
    """`what` went wrong, `why`, and what `remedy` there is. Printed as one line on stderr."""

    def __init__(self, what: str, why: str = "", remedy: str = "") -> None:
        parts = [what]
        if why:
            parts.append(why)
        line = ": ".join(parts)
        if remedy:
            line = f"{line}. {remedy}"
        super().__init__(" ".join(line.split()))
