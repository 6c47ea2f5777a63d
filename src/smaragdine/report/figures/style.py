"""The look of all figures: sizes, colours, units on axes, notes, and names that fit.

Figures are made at their final size, so a point in the file is a point on paper: 84 mm for a column, 174 mm
for a page, no text below 7 pt. Colours are those of Okabe and Ito, safe for colour-blind readers.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

from smaragdine.errors import UserError, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure


# Text at its size on paper: how wide it is, names that fit and still differ, and line breaks.

FONT = "DejaVu Sans"  # comes with matplotlib, so it is the same everywhere
TEXT_PT = 7.0


def width_mm(text: str, size_pt: float = TEXT_PT) -> float:
    """How wide text is on paper."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    font = FontProperties(family=FONT, size=size_pt)
    width_pt, _, _ = TextToPath().get_text_width_height_descent(text, font, ismath=False)
    return float(width_pt) / 72 * 25.4


def shortened(name: str, most_mm: float, size_pt: float = TEXT_PT) -> str:
    """Shortens a name until it fits. Its end tells it apart, so segments after the first go."""
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
    """Labels that fit and still differ, and a note about them.

    They are shortened; or reduced to what differs; or replaced by letters, as in the paper.
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
    """What all labels begin with, the part that differs, and what all end with, in whole words."""
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
    """Breaks text into lines that fit."""
    lines: list[str] = []
    text = re.sub(r"(\d) (%|[kmµ]?[JWs]\b)", "\\1\u00a0\\2", visible(text))  # keep numbers and units together
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and width_mm(longer) <= most_mm:
            lines[-1] = longer
        else:
            lines.append(shortened(word, most_mm))
    return lines


COLUMN_MM = 84.0
PAGE_MM = 174.0
_USUAL_LINES = 2  # lines of notes that a figure has room for
INK = "#222222"
FAINT = "#6b6b6b"

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
SKY, PINK, BLACK, PALE = "#56B4E9", "#CC79A7", "#000000", "#D9D9D9"
SERIES = (BLUE, VERMILLION, GREEN, ORANGE, PINK, SKY, BLACK)
DASHES = ("-", "--", "-.", ":")
PHASES = {"forward": BLUE, "backward": ORANGE, "optimizer": GREEN, "other": PINK}
UNKNOWN = "#5A5A5A"  # the colour of a phase that is not known
LIMITS = {"W": "Power limit", "MHz": "Clock limit"}  # unit → name of the axis
IDLE = PALE

# One hue that gets darker with more energy, in print and to every eye.
_INTENSITY = ("#F1FAF5", "#C9EBDA", "#94D5B8", "#55B892", "#15956B", "#00714C", "#004B33")
_DIFFERENCE = ("#00456E", BLUE, "#9CCBE8", "#F7F7F7", "#F4BE94", VERMILLION, "#7F3700")

_LOOK: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.grid": False,
    "axes.labelcolor": INK,
    "axes.labelsize": TEXT_PT,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 3.0,
    "axes.titlesize": TEXT_PT + 0.5,
    "axes.titleweight": "bold",
    "figure.constrained_layout.h_pad": 0.04,
    "figure.constrained_layout.w_pad": 0.03,
    "figure.dpi": 100,
    "font.family": FONT,
    "font.size": TEXT_PT,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.5,
    "hatch.linewidth": 0.6,
    "legend.borderaxespad": 0.2,
    "legend.columnspacing": 1.0,
    "legend.fontsize": TEXT_PT,
    "legend.frameon": False,
    "legend.handlelength": 1.3,
    "legend.handletextpad": 0.5,
    "legend.labelspacing": 0.3,
    "lines.linewidth": 1.0,
    "pdf.fonttype": 42,  # embed as TrueType, as publishers ask
    "pdf.compression": 9,
    "savefig.dpi": 300,
    "svg.fonttype": "path",
    "svg.hashsalt": "smaragdine",
    "text.color": INK,
    "text.parse_math": False,  # a $ in a name is a $
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "xtick.labelsize": TEXT_PT,
    "xtick.major.size": 2.5,
    "xtick.major.width": 0.6,
    "xtick.minor.size": 1.5,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
    "ytick.labelsize": TEXT_PT,
    "ytick.major.size": 2.5,
    "ytick.major.width": 0.6,
    "ytick.minor.size": 1.5,
}

Given = ParamSpec("Given")


def styled(draw: Callable[Given, Figure]) -> Callable[Given, Figure]:
    """Makes a drawing function use our look, whatever the user's own settings are."""

    @functools.wraps(draw)
    def drawn(*args: Given.args, **options: Given.kwargs) -> Figure:
        with look():
            return draw(*args, **options)

    return drawn


def look() -> Any:
    """A context in which matplotlib has our settings and none of the user's."""
    try:
        import matplotlib as mpl
        from matplotlib.style import context
    except ImportError:
        raise UserError(
            "figures need matplotlib", "it is not installed", "pip install 'smaragdine[figures]'"
        ) from None
    del mpl
    return context(["default", _LOOK])


def sheet(
    height_mm: float, rows: int = 1, columns: int = 1, wide_mm: float = COLUMN_MM, **grid: Any
) -> tuple[Figure, list[Axes]]:
    """An empty figure of a given size on paper, and its axes, row by row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(wide_mm / 25.4, height_mm / 25.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **grid)
    return figure, [each for row in axes for each in row]


def describe(figure: Figure, title: str, text: str, notes: Sequence[str] = ()) -> Figure:
    """Adds title and alt text, and below the drawing notes that help to read it."""
    wide_mm = figure.get_figwidth() * 25.4
    if notes:
        lines = wrapped("; ".join(notes), wide_mm - 2)
        if len(lines) > _USUAL_LINES and figure.get_layout_engine() is not None:
            figure.set_figheight(figure.get_figheight() + (len(lines) - _USUAL_LINES) * 3.0 / 25.4)
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=TEXT_PT, color=FAINT)
    if figure.get_layout_engine() is not None:
        # Once, here: if left to each saved file, it would depend on those saved before.
        for _ in range(2):
            figure.draw_without_rendering()
        figure.set_layout_engine("none")
    said = f" {sentence('; '.join(notes))}" if notes else ""
    # A name may hold what a text file must not.
    figure.set_label(visible(f"{title}. {text}.{said}"))
    return figure


def alt_text(figure: Figure) -> str:
    return str(figure.get_label())


def sentence(text: str) -> str:
    first = text.partition(" ")[0].rstrip(":;,")
    start = text[:1].upper() if first.isalpha() else text[:1]  # gpu:0 is a name, and stays lower case
    return f"{start}{text[1:].rstrip('.')}."


def prefixed(largest: float, unit: str) -> tuple[float, str]:
    """The factor and unit in which a quantity up to `largest` reads well: 0.02, "J" → 1e-3, "mJ"."""
    for scale, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ")):
        if largest >= scale:
            return scale, prefix + unit
    return (1.0, unit) if not largest > 0 else (1e-9, f"n{unit}")


def quantity(axis: Axis, text: str, unit: str, largest: float) -> None:
    """Labels an axis with a quantity and its unit. Data stays in the base unit: only ticks are scaled."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    scale, name = prefixed(largest, unit)
    axis.set_label_text(f"{text} ({name})")
    axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:g}".replace("-", "−")))


def duration(axis: Axis, text: str, longest_s: float) -> None:
    """Labels an axis of seconds; long ones become minutes or hours, with round ticks."""
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    if longest_s <= 600:
        quantity(axis, text, "s", longest_s)
        return
    scale, name = (60.0, "min") if longest_s <= 10_800 else (3600.0, "h")
    every = next(
        n for n in (1, 2, 5, 10, 15, 20, 30, 60, 120, 500, 2000, 10**6) if longest_s / scale / n <= 6
    )
    axis.set_label_text(f"{text} ({name})")
    axis.set_major_locator(MultipleLocator(every * scale))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:g}"))


def legend_above(axes: Axes, handles: Sequence[Any] = (), title: str | None = None) -> None:
    """Puts the legend outside, where it hides nothing, with as many entries side by side as fit."""
    shown = list(handles) or axes.get_legend_handles_labels()[0]
    wide_mm = [width_mm(str(handle.get_label())) + 6.9 for handle in shown]

    def needed_mm(columns: int) -> float:
        # As matplotlib shares them out: the first columns have one entry more.
        rows, more = divmod(len(shown), columns)
        starts = [n * rows + min(n, more) for n in range(columns + 1)]
        return sum(max(wide_mm[begin:end]) for begin, end in itertools.pairwise(starts))

    fitting = [n for n in range(1, len(shown) + 1) if needed_mm(n) <= COLUMN_MM - 13]
    axes.legend(
        handles=shown,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=max(fitting, default=1),
        title=title,
        title_fontsize=TEXT_PT,
        alignment="left",
    )


def intensity() -> Colormap:
    return _map("smaragdine", _INTENSITY)


def difference() -> Colormap:
    return _map("smaragdine difference", _DIFFERENCE)


def _map(name: str, colours: Sequence[str]) -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(name, list(colours))


def ink_on(colour: Any) -> str:
    """Black or white, whichever reads better on a colour (contrast by WCAG)."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    ink = 0.016  # the luminance of INK
    return INK if (luminance + 0.05) ** 2 > (ink + 0.05) * 1.05 else "#FFFFFF"


def named_phase(phase: str | None) -> str:
    return phase or "not known"


def colour_of_phase(phase: str | None) -> str:
    return IDLE if phase == "idle" else PHASES.get(phase or "", UNKNOWN)


def ordered_phases(phases: Iterable[str | None]) -> list[str]:
    """Known phases in the order of a step, then others by name, idle last."""
    named = {named_phase(phase) for phase in phases}
    known = [*PHASES, *sorted(named - {*PHASES, "idle"}), "idle"]
    return [phase for phase in known if phase in named]


def phase_legend(axes: Axes, phases: Iterable[str | None]) -> None:
    from matplotlib.patches import Patch

    legend_above(axes, [Patch(color=colour_of_phase(name), label=name) for name in ordered_phases(phases)])
