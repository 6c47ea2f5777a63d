"""The page of findings as one HTML file that opens anywhere, without a network and without a script.

A policy in it forbids everything but its own style and the pictures inside.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files

from smaragdine.report.figures.style import sentence
from smaragdine.report.study.cells import Cell, Column, Table, shown_as, worth_showing
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
from smaragdine.study.catalogue import MODELS
from smaragdine.study.findings import Finding
from smaragdine.version import __version__


def html_page(document: Document) -> str:
    base = files("smaragdine.report.html").joinpath("style/base.css").read_text(encoding="utf-8")
    style = base + files("smaragdine.report.study").joinpath("study.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    body = "\n".join(
        part
        for part in (
            _head(document.head, document.findings),
            _paragraphs(document.notes.get("", "")),
            _findings(document),
            _figures(document.pictures),
            _left_out(document),
            _differences(document),
            *(_table(worth_showing(table)) for table in document.tables),
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


def _head(head: Head, findings: Sequence[Finding]) -> str:
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


def _findings(document: Document) -> str:
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


def _differences(document: Document) -> str:
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


def _figures(pictures: Sequence[Picture]) -> str:
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


def _left_out(document: Document) -> str:
    items = "".join(
        f"<li><code>{html.escape(name)}</code> {html.escape(why)}</li>"
        for name, why in document.left_out.items()
    )
    return f'<section><h2>Figures left out</h2><ul class="plain">{items}</ul></section>' if items else ""


def _table(table: Table) -> str:
    heads = "".join(
        f'<th scope="col" class="{"text" if column.is_text else "number"}">{html.escape(column.title)}</th>'
        for column in table.columns
    )
    rows = "".join(
        f"<tr>{''.join(_cell(cell, column) for cell, column in zip(row, table.columns, strict=True))}</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
    return (
        f'<section><h2>{html.escape(table.title)}</h2>{note}<div class="scroll"><table class="numbers">'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _cell(cell: Cell, column: Column) -> str:
    text = html.escape(shown_as(cell, column))
    if not column.is_text:
        return f'<td class="number">{text}</td>'
    if "/" in text:  # a path breaks between its segments
        return f'<td class="text path">{text.replace("/", "/<wbr>")}</td>'
    return f'<td class="text">{text}</td>'


def _paragraphs(text: str) -> str:
    """A user's own words: paragraphs, and code between backticks; all else as it is written."""

    def inline(words: str) -> str:
        return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(words))

    found: Iterable[str] = (part.strip() for part in re.split(r"\n\s*\n", text))
    return "".join(f"<p>{inline(part)}</p>" for part in found if part)


def _anchor(finding: Finding) -> str:
    return "difference-" + re.sub(r"[^A-Za-z0-9_-]+", "-", finding.key)
