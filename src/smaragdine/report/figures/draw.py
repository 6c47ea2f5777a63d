"""Draws every figure by its name from recordings, and saves it.

The same data gives the same bytes: no date is written, and ids in an SVG come from a fixed salt.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from smaragdine.accounting.run import Run
from smaragdine.errors import UserError
from smaragdine.files import users_file
from smaragdine.report.figures.diagram import diagram_of_runs
from smaragdine.report.figures.epochs import cumulative_of_runs, epoch_power_of_runs, epochs_of_runs
from smaragdine.report.figures.layers import (
    layers_of_runs,
    phases_of_runs,
    stages_of_runs,
    top_energy_of_runs,
    top_power_of_runs,
)
from smaragdine.report.figures.matrices import difference_of_runs, similarity_of_runs
from smaragdine.report.figures.power import power_of_runs, sampling_of_runs
from smaragdine.report.figures.precision import asss_of_runs, assw_of_runs
from smaragdine.report.figures.runs import LabelledRun, NotDrawn, labelled
from smaragdine.report.figures.style import alt_text, look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES: Mapping[str, Callable[[Sequence[LabelledRun]], Figure]] = {
    "stages": stages_of_runs,
    "diagram": diagram_of_runs,
    "epoch_power": epoch_power_of_runs,
    "top_energy": top_energy_of_runs,
    "top_power": top_power_of_runs,
    "layers": layers_of_runs,
    "phases": phases_of_runs,
    "asss": asss_of_runs,
    "assw": assw_of_runs,
    "similarity": similarity_of_runs,
    "difference": difference_of_runs,
    "power": power_of_runs,
    "cumulative": cumulative_of_runs,
    "epochs": epochs_of_runs,
    "sampling": sampling_of_runs,
}
FORMATS = ("pdf", "svg", "png")
CAPTIONS = "captions.md"


@dataclass(frozen=True)
class Drawn:
    files: list[Path]
    left_out: dict[str, str]  # figure → why it cannot be drawn from these recordings
    captions: dict[str, str] = field(default_factory=dict[str, str])  # figure → its caption


def draw(
    runs: Sequence[Run],
    folder: Path,
    names: Sequence[str] | None = None,
    formats: Sequence[str] = FORMATS,
) -> Drawn:
    """Draws all figures that the recordings allow; or those named, and fails if they do not allow them.

    Alt texts, with every name in full, go into captions.md beside them.
    """
    _check("figure", names or (), FIGURES)
    _check("format", formats, FORMATS)
    if not runs:
        raise UserError("no recording to draw", remedy="Name one or more")
    with look():
        pass  # fails early if matplotlib is missing
    shown = labelled(runs)
    files: list[Path] = []
    captions: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(names or FIGURES):
        try:
            figure = FIGURES[name](shown)
        except (NotDrawn, UserError) as error:
            if names:
                raise UserError(f"figure {name} cannot be drawn", str(error)) from None
            left_out[name] = str(error)
            continue
        files += save(figure, folder, name, formats)
        captions[name] = alt_text(figure)
    if not files:
        raise UserError("no figure can be drawn", next(iter(left_out.values())))
    return Drawn([*files, write_captions(folder, captions)], left_out, captions)


def write_captions(folder: Path, captions: Mapping[str, str]) -> Path:
    """Writes each figure's caption beside the figures, to paste below it, and replaces what was there."""
    path = folder / CAPTIONS
    with users_file(path) as part:
        part.write_text(
            "\n".join(f"**{name}** {text}\n" for name, text in captions.items()), encoding="utf-8"
        )
    return path


def save(figure: Figure, folder: Path, name: str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Saves `folder`/`name`.pdf and so on, with the alt text inside; each file whole or not at all."""
    _check("format", formats, FORMATS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be created", error.strerror or str(error)) from None
    files: list[Path] = []
    for form in dict.fromkeys(formats):
        file = folder / f"{name}.{form}"
        with users_file(file) as part:
            part.write_bytes(rendered(figure, form))
        files.append(file)
    return files


def rendered(figure: Figure, form: str) -> bytes:
    text = alt_text(figure)
    title = text.partition(". ")[0]
    metadata: dict[str, dict[str, str | None]] = {
        "pdf": {
            "Title": title,
            "Subject": text,
            "Creator": "Smaragdine",
            "Producer": None,
            "CreationDate": None,
        },
        "svg": {"Title": title, "Creator": "Smaragdine", "Date": None},
        "png": {"Title": title, "Description": text, "Software": "Smaragdine"},
    }
    sink = io.BytesIO()
    with look():
        figure.savefig(sink, format=form, metadata=metadata[form])
    return _described(sink.getvalue(), text) if form == "svg" else sink.getvalue()


def _described(svg: bytes, text: str) -> bytes:
    """Adds a description to an SVG for screen readers; matplotlib writes only the title."""
    described = svg.replace(b"</title>", b"</title>\n <desc>" + html.escape(text).encode() + b"</desc>", 1)
    return described.replace(b"<svg ", b'<svg role="img" ', 1)


def _check(what: str, given: Sequence[str], known: Mapping[str, object] | Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise UserError(f"no {what} named {name}", remedy=f"There are: {', '.join(known)}")
