"""What the tests of figures share: the gallery's runs, and what legible is."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from smaragdine.report.figures import style

DOCS = Path(__file__).parents[1] / "docs"


def _gallery() -> Any:
    spec = importlib.util.spec_from_file_location("make_gallery", DOCS / "make_gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_gallery"] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


gallery = _gallery()


def texts_drawn(figure: Figure) -> list[tuple[Text, Any]]:
    """Every text that is really drawn, and the rectangle it takes, in dots."""
    found: list[Text] = []
    original = Text.draw

    def spy(text: Text, *given: Any, **more: Any) -> Any:
        if text.get_visible() and text.get_text().strip():
            found.append(text)
        return original(text, *given, **more)

    Text.draw = spy  # type: ignore[method-assign]
    try:
        with style.look():
            figure.canvas.draw()
    finally:
        Text.draw = original  # type: ignore[method-assign]
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    return [(text, text.get_window_extent(renderer)) for text in dict.fromkeys(found)]


def assert_legible(figure: Figure) -> None:
    """At its final size: wide as a column or a page, no text below 7 pt, none over another or cut off."""
    assert round(figure.get_figwidth() * 25.4, 6) in (84, 174)
    drawn = texts_drawn(figure)
    assert drawn
    assert all(text.get_fontsize() >= 7 for text, _ in drawn)
    for text, box in drawn:
        inside = box.x0 > -1 and box.y0 > -1 and box.x1 < figure.bbox.x1 + 1 and box.y1 < figure.bbox.y1 + 1
        assert inside, f"{text.get_text()!r} is cut off"
    for (a, of_a), (b, of_b) in itertools.combinations(drawn, 2):
        across = min(of_a.x1, of_b.x1) - max(of_a.x0, of_b.x0)
        down = min(of_a.y1, of_b.y1) - max(of_a.y0, of_b.y0)
        # A rectangle has room for ascenders and descenders that most texts do not use.
        assert across < 1 or down < 2.5, f"{a.get_text()!r} over {b.get_text()!r}"
