"""The page of findings as Markdown: for a repository, or a paper's supplement."""

from __future__ import annotations

from collections.abc import Sequence

from smaragdine.report.figures.style import sentence
from smaragdine.report.study.cells import escaped, markdown_text, worth_showing
from smaragdine.report.study.document import (
    Document,
    Head,
    Picture,
    counted,
    differing,
    note_key,
    sentences,
    settings_of,
    spare_notes,
)
from smaragdine.study.findings import Finding
from smaragdine.version import __version__


def markdown_page(document: Document, figures: str, form: str) -> str:
    """`figures` is the folder of the pictures, as the page sees it, and `form` what they are saved as."""
    lines = [
        "# Findings",
        "",
        *_head(document.head),
        *([document.notes[""], ""] if "" in document.notes else []),
        *_findings(document.findings),
        *_figures(document.pictures, figures, form),
    ]
    if document.left_out:
        lines += ["## Figures left out", ""]
        lines += [f"- `{name}`: {escaped(why)}" for name, why in document.left_out.items()] + [""]
    lines += _differences(document)
    for table in document.tables:
        lines.append(markdown_text(worth_showing(table)))
    return "\n".join([*lines, f"smaragdine {__version__}"]) + "\n"


def _head(head: Head) -> list[str]:
    power = ", ".join(f"{device} {how}" for device, how in head.provenance.items())
    lines = [
        f"- Machine: {escaped('; '.join(head.machines)) or 'not known'}",
        f"- Power: {escaped(power)}",
        *(f"- Data: {escaped(data)}" for data in head.data),
        f"- {head.runs} runs of {head.settings} settings",
    ]
    lines += [f"- Remark: {escaped(remark)}" for remark in head.remarks]
    return [*lines, "", "```", *head.commands, "```", ""]


def _findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return []
    lines = ["## The paper's findings", "", f"{counted(findings)}.", ""]
    lines += ["| Finding | Of | Here | There | Verdict | Rule |", "| :-- | :-- | :-- | :-- | :-- | :-- |"]
    for finding in findings:
        of = settings_of(finding)
        cells = (finding.question, of, finding.here, finding.there, finding.verdict, finding.why)
        shown = " | ".join(escaped(cell) for cell in cells)
        lines.append(f"| {shown} |")
    return [*lines, ""]


def _differences(document: Document) -> list[str]:
    lines: list[str] = []
    for finding in differing(document):
        key = note_key(finding, document.notes)
        lines += [f"### {finding.key}", "", f"{escaped(finding.question)} {escaped(sentences(finding))}", ""]
        lines += [document.notes[key], ""] if key is not None else []
    for key, text in spare_notes(document).items():
        lines += [f"### {key}", "", text, ""]
    return ["## Differences", "", *lines] if lines else []


def _figures(pictures: Sequence[Picture], folder: str, form: str) -> list[str]:
    lines = ["## Figures", ""] if pictures else []
    for picture in pictures:
        there = sentence(f"There, {picture.there}")
        lines += [
            f"### Figure {picture.number}: {picture.title} ({picture.of})",
            "",
            f"![{escaped(picture.alt)}]({folder}{picture.name}.{form})",
            "",
            f"{escaped(there)}",
            "",
        ]
    return lines
