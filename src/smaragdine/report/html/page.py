"""Writes the HTML report: one file that opens anywhere, without a network.

Style and script are ours and inside the page. A policy in it forbids everything else, so no name in a
recording can load or run anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from smaragdine.accounting.merge import MergeRule
from smaragdine.accounting.run import Run
from smaragdine.errors import UserError
from smaragdine.report.export.output import new_file
from smaragdine.report.html.data import comparison_data, run_data
from smaragdine.version import __version__

# Packs a document with numpy arrays as text for a page: small, and exact to the last bit.
#
# The text is base64 of zlib of: the length of the JSON (4 bytes), the JSON, and the arrays' bytes. In the
# JSON an array is `{"$": [type, offset, length, differences, divisor]}`. `script/unpack.js` unpacks it.

Array = npt.NDArray[Any]

_WHOLE = ("u1", "u2", "i4")
_NS = 1e9  # times in seconds are stored as whole nanoseconds, which are short


def pack(document: Mapping[str, Any]) -> str:
    arrays: list[bytes] = []
    text = json.dumps(_packed(document, arrays), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    head = text.encode("utf-8", "surrogatepass")
    whole = struct.pack("<I", len(head)) + head + b"".join(arrays)
    return base64.b64encode(zlib.compress(whole, 9)).decode("ascii")


def _packed(value: Any, arrays: list[bytes]) -> Any:
    if isinstance(value, np.ndarray):
        return {"$": _add(value, arrays)}
    if isinstance(value, Mapping):
        return {str(key): _packed(each, arrays) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_packed(each, arrays) for each in value]
    return value


def _add(values: Array, arrays: list[bytes]) -> list[Any]:
    kind, stored, differences, divisor = _shortest(values)
    offset = sum(map(len, arrays))
    # First bytes first, then second ones: neighbours are alike, and zlib finds that.
    planes = np.ascontiguousarray(stored).view(np.uint8).reshape(-1, stored.itemsize).T
    arrays.append(planes.tobytes())
    return [kind, offset, int(values.size), int(differences), divisor]


def _shortest(values: Array) -> tuple[str, Array, bool, float]:
    """Type, stored values, whether they are differences, and by what to divide them."""
    if values.dtype == np.float32:
        return "f4", values.astype("<f4"), False, 1
    if values.dtype.kind in "iub":
        whole, divisor = values.astype(np.int64), 1
    else:
        found = _as_whole(values)
        if found is None:
            return "f8", values.astype("<f8"), False, 1
        whole, divisor = found
    plain = _narrow(whole)
    steps = _narrow(np.diff(whole, prepend=np.int64(0)))
    # Times rise by about the same, and so do numbers of nodes.
    differences = len(zlib.compress(steps[1].tobytes(), 1)) < len(zlib.compress(plain[1].tobytes(), 1))
    kind, stored = steps if differences else plain
    return kind, stored, differences, divisor


def _as_whole(values: Array) -> tuple[Array, float] | None:
    """Whole numbers and a divisor that give exactly these values, if there are any."""
    if not values.size or not np.isfinite(values).all() or np.signbit(values).any():
        return None
    for divisor in (1, _NS):
        whole = np.rint(values * divisor)
        if whole.max() < 2**53 and np.array_equal(whole / divisor, values):
            return whole.astype(np.int64), divisor
    return None


def _narrow(whole: Array) -> tuple[str, Array]:
    """Whole numbers in the shortest type that holds them; below 2⁵³, as a script has no longer ones."""
    low, high = (int(whole.min()), int(whole.max())) if whole.size else (0, 0)
    for kind in _WHOLE:
        bounds = np.iinfo(kind)
        if bounds.min <= low and high <= bounds.max:
            return kind, whole.astype(f"<{kind}")
    return "f8", whole.astype("<f8")


# In this order they become one style sheet and one script.
STYLES = ("base", "header", "controls", "diagram", "table", "time", "screens")
SCRIPTS = (
    "unpack", "units", "colours", "elements", "model", "changes", "state", "epochs", "regions", "header",
    "balance", "layout", "boxes", "diagram", "icicle", "table", "trace", "power", "search", "main",
)  # fmt: skip


def write_html(runs: Sequence[Run], path: Path, rules: Sequence[MergeRule] = ()) -> None:
    """Writes the report of one run, or of two side by side, into one file; whole or not at all."""
    page = html_page(runs, rules)
    with new_file(path, force=True) as part:
        part.write_text(page, encoding="utf-8")


def html_page(runs: Sequence[Run], rules: Sequence[MergeRule] = ()) -> str:
    if not 1 <= len(runs) <= 2:
        raise UserError(
            f"a report of {len(runs)} runs cannot be drawn",
            remedy="Name one run, or two to see them side by side; smaragdine compare takes more",
        )
    changes = comparison_data(runs[0], runs[1], _all_edges(runs)) if len(runs) == 2 else None
    document: dict[str, Any] = {
        "version": __version__,
        "runs": [run_data(run, rules) for run in runs],
        "comparison": changes,
    }
    return page_of(document, " and ".join(run.name for run in runs))


def _all_edges(runs: Sequence[Run]) -> pa.Table:
    tables = [run.edges for run in runs]
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
