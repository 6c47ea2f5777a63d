"""Shows recordings, footprints and diagrams in a notebook: HTML in the notebook's own colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from smaragdine.accounting.diagram import Node
from smaragdine.accounting.footprint import DeviceTotal, Footprint, with_power
from smaragdine.accounting.merge import merge
from smaragdine.accounting.run import Run
from smaragdine.accounting.summary import RunSummary
from smaragdine.errors import visible
from smaragdine.recording.reader import Recording
from smaragdine.report.terminal import headline
from smaragdine.units import joules, seconds, watts

_TOP = 10
_TERMINAL = 110  # columns
_DEPTH = 4
_LEAST_SHARE = 0.005
_MOST_NODES = 300  # a notebook keeps every output it shows
# Bars are emerald, which reads on white and on black; all else takes the notebook's colours.
_STYLE = """<style>
.smg{font:13px/1.45 system-ui,sans-serif;font-variant-numeric:tabular-nums;max-width:68em}
.smg table{font:inherit;font-variant-numeric:inherit;border-collapse:collapse;border:0;margin:.2em 0 .6em}
.smg th,.smg td{border:0;padding:.12em .9em .12em 0;text-align:right;white-space:nowrap;background:none}
.smg th{font-weight:600;opacity:.7;border-bottom:1px solid currentColor}
.smg .l{text-align:left}
.smg .n{text-align:left;white-space:normal;overflow-wrap:break-word;max-width:30em}
.smg .b{min-width:7em;width:7em}
.smg .b i{display:block;height:.75em;border-radius:2px;background:#0f9f6e}
.smg .dim,.smg .dim td{opacity:.65}
.smg .sum td{font-weight:600;border-top:1px solid currentColor}
.smg .warn{color:#c2700a}
.smg details{margin-left:1.1em}.smg>details{margin-left:0}
.smg summary{cursor:pointer}.smg .leaf{margin-left:2.1em}
.smg .t i{display:inline-block;height:.65em;border-radius:2px;background:#0f9f6e;margin-right:.5em}
</style>"""


def html(shown: Any) -> str:
    """The `_repr_html_` of a Footprint, a Node, a Recording or a Run."""
    if isinstance(shown, Footprint):
        return _whole(footprint_html(shown))
    if isinstance(shown, Node):
        return _whole(_tree(shown))
    if isinstance(shown, Run):
        return _whole(_titled(shown))
    if isinstance(shown, Recording):
        return _whole(_titled(Run(shown)))
    raise TypeError(f"{type(shown).__name__} is not shown")


def text(run: Run) -> str:
    """The same in a terminal."""
    import io

    from smaragdine.report.tables import footprint_tables
    from smaragdine.report.terminal import console, run_tables

    written = io.StringIO()
    out = console(written, _TERMINAL)
    out.print(run_tables(run.summary))
    shown = run.shown
    if shown is not None:
        out.print(f"\n{_what(run)}; self-similar layers merged", style="dim")
        out.print(footprint_tables(merge(shown), _TOP))
    return written.getvalue().rstrip()


def _what(run: Run) -> str:
    """What the operations' energy is of."""
    if run.step is None or run.steps is None:
        return "all that was traced"
    in_all = f"; {run.steps.count} steps in all" if run.steps.count else ""
    kinds = " and ".join(dict.fromkeys(run.what(device) for device in run.step.devices))
    return f"{kinds}, of {len(run.steps.traced_ns)} traced{in_all}"


def _whole(parts: Iterable[str]) -> str:
    return f'{_STYLE}<div class="smg">{"".join(parts)}</div>'


def cell_html(run: Run) -> str:
    """Below a cell, which says itself what was run."""
    return _whole(_parts(run))


def _titled(run: Run) -> list[str]:
    command = " ".join(word for word in run.info.get("command", []) if isinstance(word, str))
    parts = [f"<div><b>{_text(command or str(run.path))}</b></div>", _line(str(run.path), "dim")]
    return parts + _parts(run)


def _parts(run: Run) -> list[str]:
    """The run's energy per device, and where a step's, or all that was traced, went."""
    parts = _devices(run.summary)
    shown = run.shown
    if run.absent is not None:
        return [*parts, _line(run.absent, "warn")]
    if shown is None:
        return [*parts, _line("no operations: nothing was traced", "dim")]
    parts.append(_line(f"{_what(run)}; self-similar layers merged", "dim"))
    # Twelve layers alike would fill the table with the same operation.
    parts += footprint_html(merge(shown))
    if run.tracing is not None:
        parts += [_line(remark, "warn") for remark in run.tracing.remarks]
    return parts


def _devices(summary: RunSummary) -> list[str]:
    rows: list[str] = []
    split = summary.program_j is not None
    for device in summary.devices.values():
        if device.scope == "part":
            continue
        adds = "" if device.scope == "device" else ", not in the sum"
        cells = [joules(device.program_j)] if split else []
        cells += [joules(device.energy_j), watts(device.mean_w), watts(device.peak_w)]
        rows.append(_row(device.device, cells, label=f"{device.provenance}{adds}"))
    adding = [device for device in summary.devices.values() if device.scope == "device"]
    if len(adding) > 1:
        sums = [joules(summary.program_j)] if split else []
        rows.append(_row("sum", [*sums, joules(summary.total_j), "", ""], label="", style="sum"))
    headers = ["device", *(["program"] if split else []), "machine", "mean", "peak", ""]
    parts = [f"<div><b>{_text(headline(summary))}</b></div>", _table(headers, rows)] if rows else []
    parts.append(_line(f"{seconds(summary.duration_s)}, {summary.status}", "dim"))
    parts += [_line(note, "dim") for note in summary.notes]
    if not rows:
        parts.append(_line("nothing was measured: see smaragdine doctor", "warn"))
    if summary.missing_s > 0.0005:
        parts.append(_line(f"missing {seconds(summary.missing_s)}: no readings", "warn"))
    return parts + [_line(problem, "warn") for problem in summary.problems]


def footprint_html(footprint: Footprint, top: int = _TOP) -> list[str]:
    parts: list[str] = []
    for device, total in sorted(footprint.devices.items(), key=lambda item: -item[1].total_j):
        table = with_power(footprint.device_rows(device))
        if not table.num_rows:
            parts.append(_line(f"{device}: {joules(total.total_j)}, shared by no operation", "dim"))
            continue
        parts.append(_device(device, total, table.slice(0, top).to_pylist(), table.slice(top)))
    lines = [
        f"{count:,} events of {device} without power: they have no energy"
        for device, count in footprint.without_power.items()
    ]
    return parts + [_line(line, "warn") for line in (*lines, *footprint.remarks)]


def _device(device: str, total: DeviceTotal, shown: Sequence[dict[str, Any]], hidden: Any) -> str:
    largest_j = max([row["energy_j"] for row in shown] + [total.idle_j]) or 1.0
    rows = [
        _bar_row(
            row["name"],
            [
                row["phase"] or "–",
                joules(row["energy_j"]),
                joules(row["uncertainty_j"]),
                _share(row["energy_j"], total),
                watts(row["power_w"]),
                f"{row['count']:,.6g}",
            ],
            row["energy_j"] / largest_j,
        )
        for row in shown
    ]
    if hidden.num_rows:
        left_j = float(hidden["energy_j"].to_numpy().sum())
        rows.append(_sum_row(f"… {hidden.num_rows:,} more names", left_j, total, None, "dim"))
    rows.append(_sum_row("(idle)", total.idle_j, total, total.idle_j / largest_j, "dim"))
    rows.append(_sum_row("total", total.total_j, total, None, "sum"))
    label = "" if total.provenance in (None, "measured") else f", {total.provenance}"
    headers = [f"{device}{label}", "", "phase", "energy", "± 95 %", "share", "power", "count"]
    return _table(headers, rows)


def _sum_row(name: str, energy_j: float, total: DeviceTotal, part: float | None, style: str) -> str:
    return _bar_row(name, ["", joules(energy_j), "", _share(energy_j, total), "", ""], part, style)


def _share(energy_j: float, total: DeviceTotal) -> str:
    return f"{energy_j / total.total_j:.1%}" if total.total_j > 0 else "–"


def _bar_row(name: str, cells: Sequence[str], part: float | None, style: str = "") -> str:
    bar = "" if part is None else f'<i style="width:{max(0.0, min(part, 1.0)):.1%}"></i>'
    rest = "".join(f"<td>{_text(cell)}</td>" for cell in cells[1:])
    first = f'<td class="l">{_text(cells[0])}</td>'
    return f'<tr class="{style}"><td class="n">{_name(name)}</td><td class="b">{bar}</td>{first}{rest}</tr>'


def _row(name: str, cells: Sequence[str], label: str, style: str = "") -> str:
    figures = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
    return (
        f'<tr class="{style}"><td class="n">{_name(name)}</td>{figures}<td class="l">{_text(label)}</td></tr>'
    )


def _table(headers: Sequence[str], rows: Sequence[str]) -> str:
    first = f'<th class="n">{_text(headers[0])}</th>'
    left = {header: ' class="l"' if header == "phase" else "" for header in headers}
    rest = "".join(f"<th{left[header]}>{_text(header)}</th>" for header in headers[1:])
    return f"<table><thead><tr>{first}{rest}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _tree(node: Node) -> list[str]:
    """The diagram as lines that unfold, with two levels open."""
    left = [_MOST_NODES]
    parts = [_branch(node, 0, left)]
    for device, total in node.footprint.devices.items():
        if node.is_root:
            parts.append(
                _line(f"{device}: {joules(total.idle_j)} of {joules(total.total_j)} idle besides", "dim")
            )
    return parts


def _branch(node: Node, depth: int, left: list[int]) -> str:
    left[0] -= 1
    share = node.share or 0.0
    split = sorted(node.by_phase.items(), key=lambda item: -item[1])
    phases = ", ".join(f"{phase} {joules(energy_j)}" for phase, energy_j in split if phase)
    bar = f'<i style="width:{share * 6:.2f}em"></i>'
    name = "(all)" if node.is_root else node.name or "(no name)"
    label = (
        f'<span class="t">{bar}</span><b>{_text(name)}</b> {_text(joules(node.energy_j))} '
        f'{share:.1%} <span class="dim">{_text(phases)}</span>'
    )
    shown = [child for child in node.children if (child.share or 0.0) >= _LEAST_SHARE]
    if not shown or depth >= _DEPTH or left[0] <= 0:
        more = f' <span class="dim">… {len(node.children)} below</span>' if node.children else ""
        return f'<div class="leaf">{label}{more}</div>'
    inside = "".join(_branch(child, depth + 1, left) for child in shown)
    if len(shown) < len(node.children):
        inside += f'<div class="leaf dim">… {len(node.children) - len(shown)} more, each below 0.5 %</div>'
    return f"<details{' open' if depth < 2 else ''}><summary>{label}</summary>{inside}</details>"


def _line(text: str, style: str) -> str:
    return f'<div class="{style}">{_text(text)}</div>'


def _name(name: str) -> str:
    """A qualified name that may break after a segment or a word."""
    return _text(name).replace("/", "/<wbr>").replace("_", "_<wbr>")


def _text(text: str) -> str:
    return escape(visible(text))
