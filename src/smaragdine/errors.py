"""What a user did or has that we cannot work with: one line, an exit code, no traceback."""

from __future__ import annotations

import re
import signal

# These would move the cursor, set the terminal's title, break a line or a table, or turn the text around.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_LONGEST = 500  # of each part of a printed line


def visible(text: str) -> str:
    """Text from a file or a program in a form that we can print: a line break in it as \\n, and so on."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, longest: int) -> str:
    """Both ends of a text that is too long: they tell most."""
    return text if len(text) <= longest else f"{text[: longest // 2]}…{text[-(longest // 2 - 1) :]}"


# As in a shell: the program is not there; or it is, but may not or cannot run.
NOT_FOUND, NOT_RUN = 127, 126


class UserError(Exception):
    """`what` went wrong, `why`, and which `remedy` there is: one line on stderr. For a program that cannot be
    run, the exit code is a shell's."""

    def __init__(self, what: str, why: str = "", remedy: str = "", exit_code: int = 2) -> None:
        self.exit_code = exit_code
        what, why, self.remedy = (_part(text) for text in (what, why, remedy))
        self.reason = f"{what}: {why}" if why else what
        super().__init__(f"{self.reason}. {self.remedy}" if remedy else self.reason)


def _part(text: str) -> str:
    """One line, whatever a file or a library put into it."""
    # Cut it before splitting it into words: there may be millions of characters.
    return shortened(visible(" ".join(shortened(text, 4 * _LONGEST).split())), _LONGEST)


def signal_name(number: int) -> str:
    """SIGKILL, for example; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
