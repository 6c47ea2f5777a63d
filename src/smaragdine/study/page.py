"""Writes figures, tables and the page that compares findings, from the results of a study.

    OUT/figures/figure-1-stages.pdf …, captions.md
    OUT/tables/stages.csv, stages.md, stages.tex …
    OUT/findings.html, findings.md, findings.json

All of it is drawn anew each time from OUT/results. OUT/notes.md is the user's, and only read.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

from rich.console import RenderableType

from smaragdine.accounting.footprint import write_json
from smaragdine.errors import UserError
from smaragdine.files import users_file
from smaragdine.report.export.paper import markdown_escaped
from smaragdine.report.figures import style
from smaragdine.report.figures.draw import rendered, save, write_captions
from smaragdine.report.figures.runs import NotDrawn
from smaragdine.report.figures.style import alt_text, look, sentence
from smaragdine.report.live import RunsDisplay
from smaragdine.report.terminal import plain_table
from smaragdine.study.custom import step_j
from smaragdine.study.document import (
    Cell,
    Column,
    Document,
    Head,
    Material,
    Picture,
    StudyTable,
    counted,
    csv_text,
    differing,
    head_of,
    latex_text,
    markdown_text,
    materials,
    note_key,
    read_notes,
    sentences,
    settings_of,
    shown_as,
    spare_notes,
    worth_showing,
)
from smaragdine.study.figures import FIGURES, OF_BASE
from smaragdine.study.findings import JudgedClaim, findings
from smaragdine.study.folder import expected_s
from smaragdine.study.plan import MODELS, StudyRun
from smaragdine.study.results import Result, load_results
from smaragdine.study.tables import cost_tables, footprints_table, study_tables
from smaragdine.sweep.sweep import Progress
from smaragdine.units import joules, seconds
from smaragdine.version import __version__

# The page of findings as Markdown, for a repository or a paper's supplement.


def markdown_page(document: Document, figures: str, form: str) -> str:
    """`figures` is the folder of the pictures, as seen from the page, and `form` their file type."""
    lines = [
        "# Findings",
        "",
        *_markdown_head(document.head),
        *([document.notes[""], ""] if "" in document.notes else []),
        *_markdown_findings(document.findings),
        *_markdown_figures(document.pictures, figures, form),
    ]
    if document.left_out:
        lines += ["## Figures left out", ""]
        lines += [f"- `{name}`: {markdown_escaped(why)}" for name, why in document.left_out.items()] + [""]
    lines += _markdown_differences(document)
    for table in document.tables:
        lines.append(markdown_text(worth_showing(table)))
    return "\n".join([*lines, f"smaragdine {__version__}"]) + "\n"


def _markdown_head(head: Head) -> list[str]:
    power = ", ".join(f"{device} {how}" for device, how in head.provenance.items())
    lines = [
        f"- Machine: {markdown_escaped('; '.join(head.machines)) or 'not known'}",
        f"- Power: {markdown_escaped(power)}",
        *(f"- Data: {markdown_escaped(data)}" for data in head.data),
        f"- {head.runs} runs of {head.settings} settings",
    ]
    lines += [f"- Remark: {markdown_escaped(remark)}" for remark in head.remarks]
    return [*lines, "", "```", *head.commands, "```", ""]


def _markdown_findings(findings: Sequence[JudgedClaim]) -> list[str]:
    if not findings:
        return []
    lines = ["## The paper's findings", "", f"{counted(findings)}.", ""]
    lines += ["| Finding | Of | Here | There | Verdict | Rule |", "| :-- | :-- | :-- | :-- | :-- | :-- |"]
    for finding in findings:
        of = settings_of(finding)
        cells = (finding.question, of, finding.here, finding.there, finding.verdict, finding.why)
        shown = " | ".join(markdown_escaped(cell) for cell in cells)
        lines.append(f"| {shown} |")
    return [*lines, ""]


def _markdown_differences(document: Document) -> list[str]:
    lines: list[str] = []
    for finding in differing(document):
        key = note_key(finding, document.notes)
        lines += [
            f"### {finding.key}",
            "",
            f"{markdown_escaped(finding.question)} {markdown_escaped(sentences(finding))}",
            "",
        ]
        lines += [document.notes[key], ""] if key is not None else []
    for key, text in spare_notes(document).items():
        lines += [f"### {key}", "", text, ""]
    return ["## Differences", "", *lines] if lines else []


def _markdown_figures(pictures: Sequence[Picture], folder: str, form: str) -> list[str]:
    lines = ["## Figures", ""] if pictures else []
    for picture in pictures:
        there = sentence(f"There, {picture.there}")
        lines += [
            f"### Figure {picture.number}: {picture.title} ({picture.of})",
            "",
            f"![{markdown_escaped(picture.alt)}]({folder}{picture.name}.{form})",
            "",
            f"{markdown_escaped(there)}",
            "",
        ]
    return lines


# The page of findings as one HTML file that opens anywhere, without a network and without a script.
#
# A policy in it forbids everything but its own style and the pictures inside.


def html_page(document: Document) -> str:
    base = files("smaragdine.report.html").joinpath("style/base.css").read_text(encoding="utf-8")
    style = base + files("smaragdine.study").joinpath("study.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    body = "\n".join(
        part
        for part in (
            _html_head(document.head, document.findings),
            _paragraphs(document.notes.get("", "")),
            _html_findings(document),
            _html_figures(document.pictures),
            _html_left_out(document),
            _html_differences(document),
            *(_html_table(worth_showing(table)) for table in document.tables),
            f"<footer>smaragdine {html.escape(__version__)}</footer>",
        )
        if part
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="referrer" content="no-referrer">',
            "<title>Findings – Smaragdine</title>",
            '<link rel="icon" href="data:,">',
            f"<style>{style}</style>",
            "</head>",
            f"<body>\n{body}\n</body>",
            "</html>",
            "",
        ]
    )


def _html_head(head: Head, findings: Sequence[JudgedClaim]) -> str:
    power = ", ".join(
        f'{html.escape(device)} <span class="provenance" data-provenance="{html.escape(how)}">'
        f"{html.escape(how)}</span>"
        for device, how in head.provenance.items()
    )
    facts = [
        ("Machine", html.escape("; ".join(head.machines) or "not known")),
        ("Power", power),
        *(("Data", html.escape(data)) for data in head.data),
        ("Runs", f"{head.runs} of {head.settings} settings"),
        ("Commands", "<br>".join(f"<code>{html.escape(one)}</code>" for one in head.commands)),
    ]
    lines = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts if text)
    remarks = "".join(f'<p class="remark">{html.escape(remark)}</p>' for remark in head.remarks)
    verdict = f'<p class="counts">{html.escape(counted(findings))}</p>' if findings else ""
    return (
        '<header><p class="brand">Smaragdine <span>study</span></p>'
        f"<h1>The paper's findings, here</h1>{verdict}<dl>{lines}</dl>{remarks}</header>"
    )


def _html_findings(document: Document) -> str:
    if not document.findings:
        return ""
    rows: list[str] = []
    study = ""
    for finding in document.findings:
        if finding.study != study:
            study = finding.study
            name = study.upper() if study in MODELS else study
            rows.append(f'<tr class="study"><th colspan="5" scope="rowgroup">{html.escape(name)}</th></tr>')
        verdict = html.escape(finding.verdict)
        if finding.verdict == "differs":
            verdict = f'<a href="#{_anchor(finding)}">{verdict}</a>'
        rows.append(
            f'<tr><th scope="row">{html.escape(finding.question)}'
            f"<small>{html.escape(settings_of(finding))}</small></th>"
            f"<td>{html.escape(finding.here)}</td><td>{html.escape(finding.there)}</td>"
            f'<td class="verdict" data-verdict="{html.escape(finding.verdict)}">{verdict}</td>'
            f'<td class="rule">{html.escape(finding.why)}</td></tr>'
        )
    heads = "".join(
        f'<th scope="col">{name}</th>' for name in ("Finding", "Here", "There", "Verdict", "Rule")
    )
    return (
        "<section><h2>Findings</h2>"
        f'<div class="scroll"><table class="findings"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _html_differences(document: Document) -> str:
    parts: list[str] = []
    for finding in differing(document):
        key = note_key(finding, document.notes)
        text = f"<p>{html.escape(sentences(finding))}</p>{_paragraphs(document.notes[key] if key else '')}"
        parts.append(
            f'<article id="{_anchor(finding)}"><h3>{html.escape(finding.question)} '
            f"<small>{html.escape(finding.key)}</small></h3>{text}</article>"
        )
    for key, note in spare_notes(document).items():
        parts.append(f"<article><h3>{html.escape(key)}</h3>{_paragraphs(note)}</article>")
    return f"<section><h2>Differences</h2>{''.join(parts)}</section>" if parts else ""


def _html_figures(pictures: Sequence[Picture]) -> str:
    parts: list[str] = []
    for picture in pictures:
        data = base64.b64encode(picture.svg).decode("ascii")
        there = html.escape(sentence(f"There, {picture.there}"))
        parts.append(
            f'<figure class="{"wide" if picture.wide else "narrow"}" id="{html.escape(picture.name)}">'
            f"<figcaption><b>Figure {picture.number}. {html.escape(picture.title)}.</b> {there} "
            f"<small>{html.escape(picture.of)}</small>"
            f'</figcaption><img alt="{html.escape(picture.alt)}" src="data:image/svg+xml;base64,{data}">'
            "</figure>"
        )
    return f'<section><h2>Figures</h2><div class="figures">{"".join(parts)}</div></section>' if parts else ""


def _html_left_out(document: Document) -> str:
    items = "".join(
        f"<li><code>{html.escape(name)}</code> {html.escape(why)}</li>"
        for name, why in document.left_out.items()
    )
    return f'<section><h2>Figures left out</h2><ul class="plain">{items}</ul></section>' if items else ""


def _html_table(table: StudyTable) -> str:
    heads = "".join(
        f'<th scope="col" class="{"text" if column.is_text else "number"}">{html.escape(column.title)}</th>'
        for column in table.columns
    )
    rows = "".join(
        f"<tr>{''.join(_html_cell(*each) for each in zip(row, table.columns, strict=True))}</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
    return (
        f'<section><h2>{html.escape(table.title)}</h2>{note}<div class="scroll"><table class="numbers">'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _html_cell(cell: Cell, column: Column) -> str:
    text = html.escape(shown_as(cell, column))
    if not column.is_text:
        return f'<td class="number">{text}</td>'
    if "/" in text:  # a path breaks between its segments
        return f'<td class="text path">{text.replace("/", "/<wbr>")}</td>'
    return f'<td class="text">{text}</td>'


def _paragraphs(text: str) -> str:
    """The user's own words: paragraphs, and code between backticks; everything else as written."""

    def inline(words: str) -> str:
        return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(words))

    found: Iterable[str] = (part.strip() for part in re.split(r"\n\s*\n", text))
    return "".join(f"<p>{inline(part)}</p>" for part in found if part)


def _anchor(finding: JudgedClaim) -> str:
    return "difference-" + re.sub(r"[^A-Za-z0-9_-]+", "-", finding.key)


FIGURES_FOLDER, TABLES_FOLDER = "figures", "tables"
PAGE = "findings"
_FORMAT = 1


def write_study(out: Path, formats: Sequence[str] = ("pdf", "png")) -> list[Path]:
    """Draws all that OUT's results allow; returns the files, the page first."""
    results = load_results(out)
    if not results:
        raise UserError(f"{out} has no results of a study", remedy="Run one: smaragdine study bert -o DIR")
    with look():
        pass  # fails early if matplotlib is missing
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
    # They show results that are gone, or have the name they had while they were alone.
    for path in {path for each in FIGURES for path in folder.glob(f"{each.name}*.*")} - set(files):
        if path.suffix.removeprefix(".") in formats:
            path.unlink(missing_ok=True)
    if pictures:
        files.append(write_captions(folder, {picture.name: picture.alt for picture in pictures}))
    return pictures, left_out, files


def _write_tables(tables: Sequence[StudyTable], folder: Path) -> list[Path]:
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


# A study on the terminal: what is left to run, and how far it is.


def runs_table(left: Sequence[StudyRun], took_s: Mapping[str, float]) -> RenderableType:
    """The runs that a study lacks, one line per setting."""
    table = plain_table("setting", "runs", "time")
    settings: dict[str, list[StudyRun]] = {}
    for run in left:
        settings.setdefault(run.setting.name, []).append(run)
    for name, runs in settings.items():
        table.add_row(name, str(len(runs)), seconds(expected_s(runs, took_s)))
    return table


class StudyDisplay(RunsDisplay):
    """Shows how a study goes."""

    def begin(self, run: StudyRun, progress: Progress) -> None:
        self.show(run.name, progress)

    def end(self, run: StudyRun, result: Result, progress: Progress) -> None:
        step = f"{joules(step_j(result.step))} and {seconds(result.step_s)} a step"
        self.ended(f"{run.name}: {step}", progress)
