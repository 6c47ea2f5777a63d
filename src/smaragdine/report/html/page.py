"""The HTML report: one file that opens anywhere, without a network.

Style and script are ours and inside the page; a policy in it forbids everything else, so that no name in a
recording can load or run anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow as pa

from smaragdine.accounting.merge import Rule
from smaragdine.accounting.overview import Overview, overview
from smaragdine.errors import UserError
from smaragdine.recording.reader import Recording
from smaragdine.report.export.output import new_file
from smaragdine.report.html.data import comparison_data, run_data, title_of
from smaragdine.report.html.pack import pack
from smaragdine.version import __version__

# In this order they make one style sheet and one script.
STYLES = ("base", "header", "controls", "diagram", "table", "time", "screens")
SCRIPTS = (
    "unpack",
    "units",
    "colours",
    "elements",
    "model",
    "changes",
    "state",
    "epochs",
    "regions",
    "header",
    "balance",
    "layout",
    "boxes",
    "diagram",
    "icicle",
    "table",
    "trace",
    "power",
    "search",
    "main",
)


def write_html(
    recordings: Sequence[Recording],
    path: Path,
    overviews: Sequence[Overview] | None = None,
    rules: Sequence[Rule] = (),
) -> None:
    """The report of one run, or of two side by side, as one file; whole or not at all.

    `overviews` are those of the recordings, where they are there already.
    """
    page = html_page(recordings, overviews, rules)
    with new_file(path, force=True) as part:
        part.write_text(page, encoding="utf-8")


def html_page(
    recordings: Sequence[Recording],
    overviews: Sequence[Overview] | None = None,
    rules: Sequence[Rule] = (),
) -> str:
    if not 1 <= len(recordings) <= 2:
        raise UserError(
            f"a report of {len(recordings)} runs cannot be drawn",
            remedy="Name one run, or two to see them side by side; smaragdine compare takes more",
        )
    found = [overview(recording) for recording in recordings] if overviews is None else list(overviews)
    changes = comparison_data(found[0], found[1], _all_edges(recordings)) if len(found) == 2 else None
    document: dict[str, Any] = {
        "version": __version__,
        "runs": [run_data(run, seen, rules) for run, seen in zip(recordings, found, strict=True)],
        "comparison": changes,
    }
    return page_of(document, " and ".join(title_of(recording) for recording in recordings))


def _all_edges(recordings: Sequence[Recording]) -> pa.Table:
    tables = [recording.edges for recording in recordings]
    return pa.concat_tables(tables).group_by(tables[0].column_names).aggregate([])


def page_of(document: dict[str, Any], title: str) -> str:
    style = "\n".join(_text(f"style/{name}.css") for name in STYLES)
    script = '"use strict";\n' + "\n".join(_text(f"script/{name}.js") for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(f"{title} – Smaragdine"),
        "style": style,
        "script": script,
        "data": pack(document),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _text("page.html"))


def _text(name: str) -> str:
    return files("smaragdine.report.html").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"
