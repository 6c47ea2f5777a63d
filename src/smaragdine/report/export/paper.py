"""Exports the names that use most as a table for a paper, in LaTeX (booktabs) or Markdown: one per device.

Figures have as many digits as their uncertainty allows. The caption says what was measured, on what, and how.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smaragdine.accounting.footprint import DeviceTotal, Footprint, with_power
from smaragdine.accounting.run import hardware, program
from smaragdine.errors import UserError, visible
from smaragdine.report.export.selection import Selection
from smaragdine.units import joules, si
from smaragdine.version import __version__

_NONE = "–"
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_\allowbreak{}",
    "/": r"/\allowbreak{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\char34{}",
    "`": r"\textasciigrave{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "µ": r"$\mu$",
    "÷": r"$\div$",
    "−": r"$-$",
    "–": r"--",
    "…": r"\ldots{}",
    "\u202f": r"\,",
}
_MARKDOWN = {sign: f"\\{sign}" for sign in "\\`*_[]<>|~$"}


@dataclass(frozen=True)
class PaperTable:
    label: str
    caption: str
    headers: tuple[str, ...]  # the first two columns are text
    rows: list[tuple[str, ...]]
    sums: list[tuple[str, ...]]  # what the rows leave out, and the total


def latex_text(chosen: Selection, top: int) -> str:
    return "\n\n".join(_latex(table) for table in _tables(chosen, top)) + "\n"


def markdown_text(chosen: Selection, top: int) -> str:
    return "\n\n".join(_markdown(table) for table in _tables(chosen, top)) + "\n"


def latex_escaped(text: str) -> str:
    """Escapes text for LaTeX; paths may break at their slashes."""
    return _signs(text, _LATEX)


def markdown_escaped(text: str) -> str:
    return _signs(text, _MARKDOWN)


def _tables(chosen: Selection, top: int) -> list[PaperTable]:
    footprint = chosen.needs_footprint()
    devices = [device for device in footprint.devices if footprint.device_rows(device).num_rows]
    if not devices:
        raise UserError(f"{chosen.run.recording.path} has no operations with energy", chosen.run.why_none)
    return [_table(chosen, footprint, device, top) for device in devices]


def _table(chosen: Selection, footprint: Footprint, device: str, top: int) -> PaperTable:
    total = footprint.devices[device]
    rows = with_power(footprint.device_rows(device))
    shown, hidden = rows.slice(0, top).to_pylist(), rows.slice(top)
    largest_j = max([row["energy_j"] for row in shown], default=total.total_j)
    number, _, unit = si(largest_j or 1.0, "J").partition(" ")
    scale = 10.0 ** round(math.log10((largest_j or 1.0) / float(number)))
    sums: list[tuple[str, ...]] = []
    if hidden.num_rows:
        left_j = float(hidden["energy_j"].to_numpy().sum())
        sums.append(_sum(f"{hidden.num_rows} more", left_j, scale, total))
    sums += [_sum("(idle)", total.idle_j, scale, total), _sum("total", total.total_j, scale, total)]
    return PaperTable(
        label="".join(c if c.isascii() and c.isalnum() else "-" for c in f"{chosen.run.name}-{device}"),
        caption=_caption(chosen, device, total, len(shown) if hidden.num_rows else 0),
        headers=("Operation", "Phase", f"Energy ({unit})", "Share (%)", "Power (W)", "Busy (ms)", "Count"),
        rows=[_row(row, scale, total) for row in shown],
        sums=sums,
    )


def _row(row: dict[str, Any], scale: float, total: DeviceTotal) -> tuple[str, ...]:
    energy_j: float = row["energy_j"]
    off_j: float = row["uncertainty_j"] or 0.0
    off = off_j / energy_j if energy_j > 0 else None
    share = energy_j / total.total_j * 100 if total.total_j > 0 else None
    energy = _digits(energy_j / scale, off)
    if off:
        energy += f" ± {_digits(off_j / scale, None, _place(off_j / scale))}"
    return (
        row["name"],
        row["phase"] or _NONE,
        energy,
        _NONE if share is None else _digits(share, off, least=-1),
        _digits(row["power_w"], off),
        _digits(row["busy_s"] * 1000, None),
        f"{row['count']:.6g}",
    )


def _sum(name: str, energy_j: float, scale: float, total: DeviceTotal) -> tuple[str, ...]:
    share = f"{energy_j / total.total_j * 100:.1f}" if total.total_j > 0 else _NONE
    return name, "", _digits(energy_j / scale, None), share, "", "", ""


def _place(uncertainty: float) -> int:
    """The power of ten of the last digit: two digits of an uncertainty that begins below 3, else one."""
    digits = 2 if f"{uncertainty:e}"[0] in "12" else 1
    return math.floor(math.log10(uncertainty)) - digits + 1


def _digits(value: float | None, off: float | None, place: int | None = None, least: int = -9) -> str:
    """A value with the digits that its relative uncertainty `off` allows; three if that is not known."""
    if value is None:
        return _NONE
    if value == 0:
        return "0"
    if place is None:
        place = _place(abs(value) * off) if off else math.floor(math.log10(abs(value))) - 2
    place = max(place, least)
    text = f"{round(value, -place):.{max(0, -place)}f}"
    whole, _, rest = text.partition(".")
    grouped = f"{int(whole):,}".replace(",", "\u202f") if len(whole) > 4 else whole
    return f"{grouped}.{rest}" if rest else grouped


def _caption(chosen: Selection, device: str, total: DeviceTotal, shown: int) -> str:
    """`shown` is the number of rows if there are more; 0: all rows are shown."""
    run, info = chosen.run, chosen.run.info
    what = hardware(info, device)
    limits = [
        f"limit {gpu['power_limit_w']:g} W"
        for gpu in (info.get("host") or {}).get("gpus") or []
        if gpu.get("device") == device and isinstance(gpu.get("power_limit_w"), int | float)
    ]
    where = ", ".join([device, *([what] if what else []), *limits])
    sentences = [
        f"Energy of {chosen.of[device]} of {program(info)} on {where}: {joules(total.total_j)}"
        f"{f', the {shown} largest rows' if shown else ''}",
        "± is half the 95 % interval",
    ]
    known = run.summary.devices.get(device)
    measured = known is not None and known.provenance == "measured"
    sensor = f" ({known.source.partition(':')[0]})" if known is not None and measured else ""
    sentences.append(f"Power {total.provenance or 'of unknown provenance'}{sensor}")
    if run.steps is not None and run.tracing is not None:
        libraries: dict[str, str] = info.get("libraries") or {}
        by = [f"{name} {libraries[name]}" if name in libraries else name for name in run.tracing.frameworks]
        # Nobody announced steps that were found in slices of time, so they have no count.
        of_all = f" of {run.steps.count}" if run.steps.count else ""
        traced = f"{len(run.steps.traced_ns)}{of_all} steps traced"
        sentences.append(f"{traced} with {' and '.join(by)}, smaragdine {__version__}")
    else:
        sentences.append(f"smaragdine {__version__}")
    return ". ".join(sentences) + "."


def _latex(table: PaperTable) -> str:
    def line(cells: tuple[str, ...], name: str) -> str:
        return " & ".join([name, *(latex_escaped(cell) for cell in cells[1:])])

    return booktabs(
        table.label,
        table.caption,
        r"p{0.33\linewidth}l" + "r" * (len(table.headers) - 2),
        [line(table.headers, table.headers[0])],
        [line(row, rf"\raggedright \texttt{{{latex_escaped(row[0])}}}") for row in table.rows],
        [line(row, latex_escaped(row[0])) for row in table.sums],
    )


def booktabs(label: str, caption: str, columns: str, *parts: Sequence[str]) -> str:
    """A table over the page's width; between its parts, which are lines of cells, there is a rule."""
    ruled = "\n    \\midrule\n".join("\n".join(rf"    {line} \\" for line in part) for part in parts)
    return "\n".join(
        [
            r"% \usepackage{booktabs}",
            r"\begin{table*}",
            r"  \centering\small",
            rf"  \caption{{{latex_escaped(caption)}}}",
            rf"  \label{{tab:{label}}}",
            rf"  \begin{{tabular}}{{@{{}}{columns}@{{}}}}",
            r"    \toprule",
            ruled,
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table*}",
        ]
    )


def _markdown(table: PaperTable) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cells) + " |"

    def escaped(cells: tuple[str, ...]) -> str:
        return line((markdown_escaped(cells[0]), markdown_escaped(cells[1]), *cells[2:]))

    return "\n".join(
        [
            markdown_escaped(table.caption),
            "",
            line(table.headers),
            line((":--", ":--", *("--:" for _ in table.headers[2:]))),
            *(escaped(row) for row in (*table.rows, *table.sums)),
        ]
    )


def _signs(text: str, signs: dict[str, str]) -> str:
    return "".join(signs.get(sign, sign) for sign in visible(text))
