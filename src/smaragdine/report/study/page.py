"""Figures, tables and the page that compares findings, from the results of a study.

    OUT/figures/figure-1-stages.pdf …, captions.md
    OUT/tables/stages.csv, stages.md, stages.tex …
    OUT/findings.html, findings.md, findings.json

All is drawn anew each time from OUT/results; OUT/notes.md is the user's and is only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from smaragdine.accounting.footprint import write_json
from smaragdine.errors import UserError
from smaragdine.report.figures import style
from smaragdine.report.figures.draw import rendered, save, write_captions
from smaragdine.report.figures.runs import NotDrawn
from smaragdine.report.figures.style import alt_text, look
from smaragdine.report.study.cells import Table, csv_text, latex_text, markdown_text, worth_showing
from smaragdine.report.study.costs import cost_tables
from smaragdine.report.study.document import Document, Picture, head_of, read_notes
from smaragdine.report.study.footprints import footprints_table
from smaragdine.report.study.markdown import markdown_page
from smaragdine.report.study.markup import html_page
from smaragdine.report.study.material import Material, materials
from smaragdine.report.study.paper import FIGURES, OF_BASE
from smaragdine.report.study.tables import study_tables
from smaragdine.study.findings import findings
from smaragdine.study.results import load_results
from smaragdine.version import __version__
from smaragdine.whole import users_file

FIGURES_FOLDER, TABLES_FOLDER = "figures", "tables"
PAGE = "findings"
_FORMAT = 1


def write_study(out: Path, formats: Sequence[str] = ("pdf", "png")) -> list[Path]:
    """Draw all that OUT's results allow; returns the files, the page first."""
    results = load_results(out)
    if not results:
        raise UserError(f"{out} has no results of a study", remedy="Run one: smaragdine study bert -o DIR")
    with look():
        pass  # says what is missing before minutes of drawing
    kinds = materials(out, results)
    pictures, left_out, files = _draw(kinds, out / FIGURES_FOLDER, formats)
    tables = [*study_tables(kinds), *cost_tables(out, results, kinds)]
    files += _write_tables(tables, out / TABLES_FOLDER)
    footprints = footprints_table(kinds)
    files.append(out / TABLES_FOLDER / f"{footprints.name}.csv")  # too long for a page
    _write(files[-1], csv_text(footprints))
    document = Document(
        head=head_of(out, results),
        findings=tuple(findings(results, out)),
        pictures=tuple(pictures),
        left_out=left_out,
        tables=tuple(tables),
        notes=read_notes(out),
    )
    pages = [out / f"{PAGE}{suffix}" for suffix in (".html", ".md", ".json")]
    _write(pages[0], html_page(document))
    shown = next((form for form in ("png", "svg") if form in formats), formats[0])
    _write(pages[1], markdown_page(document, f"{FIGURES_FOLDER}/", shown))
    write_json(_json(document, formats), pages[2])
    return [*pages, *files]


def _draw(
    kinds: Sequence[Material], folder: Path, formats: Sequence[str]
) -> tuple[list[Picture], dict[str, str], list[Path]]:
    pictures: list[Picture] = []
    left_out: dict[str, str] = {}
    files: list[Path] = []
    for wanted in FIGURES:
        for material in kinds:
            name = f"{wanted.name}{material.suffix}"
            try:
                figure = wanted.draw(material)
            except (NotDrawn, UserError) as error:
                left_out[name] = str(error)
                continue
            files += save(figure, folder, name, formats)
            wide = figure.get_figwidth() * 25.4 > style.COLUMN_MM + 1
            pictures.append(
                Picture(
                    name,
                    wanted.number,
                    wanted.title,
                    material.base[0].setting if wanted.number in OF_BASE else material.kind,
                    wanted.there,
                    alt_text(figure),
                    rendered(figure, "svg"),
                    wide,
                )
            )
    # Of results that are there no more, or under the name that they had while they were alone.
    for path in {path for each in FIGURES for path in folder.glob(f"{each.name}*.*")} - set(files):
        if path.suffix.removeprefix(".") in formats:
            path.unlink(missing_ok=True)
    if pictures:
        files.append(write_captions(folder, {picture.name: picture.alt for picture in pictures}))
    return pictures, left_out, files


def _write_tables(tables: Sequence[Table], folder: Path) -> list[Path]:
    files: list[Path] = []
    for table in tables:
        texts = {
            ".csv": csv_text(table),
            ".md": markdown_text(table),
            ".tex": latex_text(worth_showing(table)),
        }
        for suffix, text in texts.items():
            _write(folder / f"{table.name}{suffix}", text)
            files.append(folder / f"{table.name}{suffix}")
    return files


def _json(document: Document, formats: Sequence[str]) -> dict[str, object]:
    return {
        "format_version": _FORMAT,
        "smaragdine_version": __version__,
        **asdict(document.head),
        "findings": [asdict(finding) for finding in document.findings],
        "figures": {
            picture.name: {
                "title": picture.title,
                "of": picture.of,
                "text": picture.alt,
                "files": [f"{FIGURES_FOLDER}/{picture.name}.{form}" for form in formats],
            }
            for picture in document.pictures
        },
        "left_out": dict(document.left_out),
        "tables": [f"{TABLES_FOLDER}/{table.name}.csv" for table in document.tables],
        "notes": dict(document.notes),
    }


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent} cannot be created", error.strerror or str(error)) from None
    with users_file(path) as part:
        part.write_text(text, encoding="utf-8")
