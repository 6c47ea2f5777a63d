"""Text at its size on paper: how wide it is, names that fit and still differ, lines that break."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from smaragdine.errors import visible

FONT = "DejaVu Sans"  # comes with matplotlib: the same on every machine
TEXT_PT = 7.0


def width_mm(text: str, size_pt: float = TEXT_PT) -> float:
    """How wide a text is on paper."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    font = FontProperties(family=FONT, size=size_pt)
    width_pt, _, _ = TextToPath().get_text_width_height_descent(text, font, ismath=False)
    return float(width_pt) / 72 * 25.4


def shortened(name: str, most_mm: float, size_pt: float = TEXT_PT) -> str:
    """A name that fits. What tells names apart is at the end: segments after the first go."""
    name = visible(name)
    if width_mm(name, size_pt) <= most_mm:
        return name
    segments = name.split("/")
    for gone in range(2, len(segments)):
        short = "/".join([segments[0], "…", *segments[gone:]])
        if width_mm(short, size_pt) <= most_mm:
            return short
    last = name if len(segments) < 3 else f"…/{segments[-1]}"
    if width_mm(last, size_pt) <= most_mm:
        return last
    kept = max(2, math.floor(len(last) * most_mm / width_mm(last, size_pt)))
    while kept > 2 and width_mm(_cut(last, kept), size_pt) > most_mm:
        kept -= 1
    return _cut(last, kept)


def distinct(labels: Iterable[str], most_mm: float) -> tuple[list[str], list[str]]:
    """Labels that fit and still differ, and what to say about them.

    Shortened; or what they do not have in common; or letters, as the paper has.
    """
    whole = [visible(label) for label in labels]
    short = [shortened(label, most_mm) for label in whole]
    if len(set(short)) == len(set(whole)):
        return short, []
    prefix, middles, suffix = _apart(whole)
    if all(middles) and all(width_mm(middle) <= most_mm for middle in middles):
        return middles, [f"names: {prefix}…{suffix}"]
    letters = [chr(ord("a") + n) if n < 26 else f"{n + 1}" for n in range(len(whole))]
    return letters, [", ".join(f"{letter}:\u00a0{name}" for letter, name in zip(letters, whole, strict=True))]


def _apart(labels: Sequence[str]) -> tuple[str, list[str], str]:
    """What all begin with, what is between in each, and what all end with: whole words."""
    words = [re.split(r"(?<=[-_/. ])", label) for label in labels]
    same = 0
    while all(len(each) > same + 1 and each[same] == words[0][same] for each in words):
        same += 1
    rest = [each[same:] for each in words]
    ends = 0
    while all(len(each) > ends + 1 and each[-ends - 1] == rest[0][-ends - 1] for each in rest):
        ends += 1
    middles = ["".join(each[: len(each) - ends]).rstrip("-_/., ") for each in rest]
    return "".join(words[0][:same]), middles, "".join(rest[0][len(rest[0]) - ends :])


def _cut(text: str, kept: int) -> str:
    head = (kept - 1) // 2
    return f"{text[:head]}…{text[len(text) - (kept - 1 - head) :]}"


def wrapped(text: str, most_mm: float) -> list[str]:
    """Lines of words that fit."""
    lines: list[str] = []
    text = re.sub(r"(\d) (%|[kmµ]?[JWs]\b)", "\\1\u00a0\\2", visible(text))  # a number stays with its unit
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and width_mm(longer) <= most_mm:
            lines[-1] = longer
        else:
            lines.append(shortened(word, most_mm))
    return lines
