"""One line on stderr for each event worth knowing, and never a flood of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_BURST = 50
_PER_SECOND = 2.0
_SAME_EVERY_S = 60.0


def make_say(mono_s: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """A bucket that refills: what does not fit is counted, and the count said with the next line. A line that
    comes again and again is said once a minute."""
    left, seen_s, held_back = float(_BURST), mono_s(), 0
    last_line, last_s = "", 0.0

    def say(line: str) -> None:
        nonlocal left, seen_s, held_back, last_line, last_s
        now_s = mono_s()
        left = min(float(_BURST), left + (now_s - seen_s) * _PER_SECOND)
        seen_s = now_s
        if left < 1.0 or (line == last_line and now_s - last_s < _SAME_EVERY_S):
            held_back += 1
            return
        last_line, last_s = line, now_s
        left -= 1.0
        more = f" ({held_back} lines before this one were held back)" if held_back else ""
        held_back = 0
        try:
            print(f"smaragdine: {_one_line(line)}{more}", file=sys.stderr, flush=True)
        except (OSError, ValueError):  # nobody listens any more
            return

    return say


def _one_line(text: str) -> str:
    """Names come from users: nothing in them may look like a line of its own or move the cursor."""
    return "".join(c if c.isprintable() else " " for c in text)[:500]
