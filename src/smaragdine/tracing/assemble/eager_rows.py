"""Operations that TensorFlow ran one by one, outside any function: their type is all the profiler tells.

The hook's own events around them say where they are written; see hook/keras_scopes.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MARK = "smaragdine:"
_OPERATION = "EagerLocalExecute: "
_KERNEL = "EagerKernelExecute"


def eager_rows(texts: dict[int, str], line: Any) -> Iterator[tuple[str, int, int]]:
    """`scope/Type:Type`, begin and length in picoseconds, of each kernel of a line."""
    wanted = {
        key: text for key, text in texts.items() if text.startswith((MARK, _OPERATION)) or text == _KERNEL
    }
    if not any(text == _KERNEL for text in wanted.values()):
        return
    events = [
        (event.offset_ps, -event.duration_ps, wanted[event.metadata_id])
        for event in line.events
        if event.metadata_id in wanted
    ]
    around: list[tuple[int, str]] = []  # end and text of what is open, the innermost last
    for begin_ps, length_ps, text in sorted(events):
        while around and around[-1][0] <= begin_ps:
            around.pop()
        if text != _KERNEL:
            around.append((begin_ps - length_ps, text))
            continue
        kind = around[-1][1].removeprefix(_OPERATION) if around else ""
        # A function's own operations are recorded where they run.
        if kind and not kind.startswith((MARK, "__")):
            scope = next(
                (text.removeprefix(MARK) for _, text in reversed(around) if text.startswith(MARK)), ""
            )
            yield f"{scope}/{kind}:{kind}" if scope else f"{kind}:{kind}", begin_ps, -length_ps
