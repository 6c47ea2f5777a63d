"""Collects all that a page of findings says in one object, for HTML, Markdown and JSON alike."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from smaragdine.accounting.arithmetic import adding_devices, working_device
from smaragdine.accounting.footprint import Footprint, column
from smaragdine.accounting.run import Run
from smaragdine.errors import UserError, visible
from smaragdine.recording.tables import guarded
from smaragdine.report.export.paper import booktabs, latex_escaped, markdown_escaped
from smaragdine.report.figures.runs import NotDrawn
from smaragdine.stats import deviation
from smaragdine.study.custom import values_of, varied
from smaragdine.study.findings import JudgedClaim
from smaragdine.study.folder import RUNS, read_made
from smaragdine.study.plan import PROGRAM, STAGES
from smaragdine.study.results import Result, Sketch, by_setting, load_sketch, sketch_of
from smaragdine.study.roles import Shape, groups, shape_of
from smaragdine.units import plus_minus, seconds, si

# A table of a study: as CSV with every figure in its base unit, and as Markdown and LaTeX for people.

NONE = "–"


@dataclass(frozen=True)
class MeanOverRuns:
    """Over runs. A single run has no spread."""

    mean: float
    std: float | None
    runs: int


Cell = MeanOverRuns | float | int | str | None


@dataclass(frozen=True)
class Column:
    key: str  # its name in a CSV, with its unit: energy_j
    title: str
    unit: str = ""  # J, W, s, %, 1, part (shown in %); empty: text or a count

    @property
    def is_text(self) -> bool:
        return not self.unit


@dataclass(frozen=True)
class StudyTable:
    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


def mean_of(values: Sequence[float | None]) -> MeanOverRuns | None:
    """None if no run has it."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return MeanOverRuns(
        math.fsum(known) / len(known), deviation(known) if len(known) > 1 else None, len(known)
    )


def worth_showing(table: StudyTable) -> StudyTable:
    """Drops empty columns, and the kind if there is only one: pages are narrow, and the CSV has all."""

    def says(n: int) -> bool:
        cells = [row[n] for row in table.rows]
        if table.columns[n].key == "kind":
            return len(set(cells)) > 1
        return any(
            (cell.mean if isinstance(cell, MeanOverRuns) else cell) not in (None, 0, "") for cell in cells
        )

    kept = [n for n in range(len(table.columns)) if says(n)]
    return replace(
        table,
        columns=tuple(table.columns[n] for n in kept),
        rows=tuple(tuple(row[n] for n in kept) for row in table.rows),
    )


def csv_text(table: StudyTable) -> str:
    """Means with their standard deviation and the number of runs beside them."""
    spread = [any(isinstance(row[n], MeanOverRuns) for row in table.rows) for n in range(len(table.columns))]
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    heads: list[str] = []
    for each, wide in zip(table.columns, spread, strict=True):
        heads += [each.key, f"{each.key}_std", f"{each.key}_runs"] if wide else [each.key]
    writer.writerow(heads)
    for row in table.rows:
        cells: list[float | int | str | None] = []
        for cell, wide in zip(row, spread, strict=True):
            if isinstance(cell, MeanOverRuns):
                cells += [cell.mean, cell.std, cell.runs]
            else:
                cells += [cell, None, None] if wide else [cell]
        shown = [guarded(cell) if isinstance(cell, str) else cell for cell in cells]
        writer.writerow(["" if cell is None else cell for cell in shown])
    return sink.getvalue()


def markdown_text(table: StudyTable, level: int = 2) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    shown = [
        line(
            [
                markdown_escaped(shown_as(cell, column))
                for cell, column in zip(row, table.columns, strict=True)
            ]
        )
        for row in table.rows
    ]
    return "\n".join(
        [
            f"{'#' * level} {table.title}",
            "",
            *([table.note, ""] if table.note else []),
            line([column.title for column in table.columns]),
            line([":--" if column.is_text else "--:" for column in table.columns]),
            *shown,
            "",
        ]
    )


def latex_text(table: StudyTable) -> str:
    """With booktabs, like `smaragdine export`."""

    def line(cells: Iterable[str]) -> str:
        return " & ".join(map(latex_escaped, cells))

    rows = [
        line(shown_as(cell, column) for cell, column in zip(row, table.columns, strict=True))
        for row in table.rows
    ]
    columns = "".join("l" if column.is_text else "r" for column in table.columns)
    caption = f"{table.title}. {table.note}".strip()
    heads = [line(column.title for column in table.columns)]
    return booktabs(f"study-{table.name}", caption, columns, heads, rows) + "\n"


def shown_as(cell: Cell, column: Column) -> str:
    if cell is None:
        return NONE
    if isinstance(cell, str):
        return visible(cell)
    mean, std = (cell.mean, cell.std) if isinstance(cell, MeanOverRuns) else (float(cell), None)
    if not column.unit:
        return f"{mean:,.0f}" if mean == round(mean) or abs(mean) >= 1000 else f"{mean:.4g}"
    if column.unit in ("J", "W"):
        # A column that is all empty needs no spread.
        known = std is not None and not mean == std == 0
        return plus_minus(mean, std or 0.0, column.unit) if known else si(mean, column.unit)
    if column.unit == "s":
        return seconds(mean) if std is None or mean >= 120 else plus_minus(mean, std, "s")
    if column.unit == "part":
        return f"{100 * mean:.1f} %".replace("-", "−")
    digits = 2 if column.unit == "%" else 4
    unit = " %" if column.unit == "%" else ""
    return f"{mean:.{digits}f}{'' if std is None else f' ± {std:.{digits}f}'}{unit}".replace("-", "−")


NOTES = "notes.md"
VERDICTS = ("agrees", "differs", "not comparable")
_SECTION = re.compile(r"^##\s+`?([^`\n]+?)`?\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Picture:
    """A figure that was drawn."""

    name: str  # name of its files
    number: int  # number in the paper
    title: str
    of: str  # the kind of results, or the name of one setting
    there: str  # what the paper's figure showed
    alt: str
    svg: bytes
    wide: bool  # as wide as a page, not a column


@dataclass(frozen=True)
class Head:
    """What was run, on what, and how its power is known."""

    machines: tuple[str, ...]
    commands: tuple[str, ...]
    data: tuple[str, ...]
    provenance: Mapping[str, str]  # device → measured, estimated
    settings: int
    runs: int
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Document:
    head: Head
    findings: tuple[JudgedClaim, ...]
    pictures: tuple[Picture, ...]
    left_out: Mapping[str, str]  # figure → why it cannot be drawn
    tables: tuple[StudyTable, ...]
    notes: Mapping[str, str]  # what the user wrote: key of a finding → text; "": text before all keys


def head_of(out: Path, results: Sequence[Result]) -> Head:
    return Head(
        machines=_distinct(result.hardware for result in results),
        commands=_commands(out, results),
        data=_distinct(result.data for result in results),
        provenance=provenance_of(results),
        settings=len({result.setting for result in results}),
        runs=len(results),
        remarks=_remarks(results),
    )


def provenance_of(results: Sequence[Result]) -> dict[str, str]:
    """Device → measured or estimated, over all results."""
    found: dict[str, dict[str, None]] = {}
    for result in results:
        for device in adding_devices(result.step):
            known = result.provenance.get(device) or result.step.devices[device].provenance or "not known"
            found.setdefault(device, {})[known] = None
    return {device: ", ".join(known) for device, known in sorted(found.items())}


def read_notes(out: Path) -> dict[str, str]:
    """Reads OUT/notes.md by its second headings: what a person wrote outlives every redrawing."""
    path = out / NOTES
    if not path.is_file():
        return {}
    try:
        parts = _SECTION.split(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read", str(error)) from None
    first = re.sub(r"^#\s.*$", "", parts[0], flags=re.MULTILINE)
    found = {"": first, **dict(zip(parts[1::2], parts[2::2], strict=True))}
    return {key: text.strip() for key, text in found.items() if text.strip()}


def note_key(finding: JudgedClaim, notes: Mapping[str, str]) -> str | None:
    """The finding's own key, or the longest that its key begins with: one note may serve all precisions."""
    found = [key for key in notes if key and (finding.key == key or finding.key.startswith(f"{key}-"))]
    return max(found, key=len, default=None)


def differing(document: Document) -> list[JudgedClaim]:
    return [finding for finding in document.findings if finding.verdict == "differs"]


def spare_notes(document: Document) -> dict[str, str]:
    """Notes that belong to no difference, so that nothing a person wrote is lost."""
    used = {note_key(finding, document.notes) for finding in differing(document)}
    return {key: text for key, text in document.notes.items() if key and key not in used}


def counted(findings: Sequence[JudgedClaim]) -> str:
    """Counts verdicts: 12 agree, 3 differ, 2 not comparable."""
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in VERDICTS}
    words = {"agrees": ("agrees", "agree"), "differs": ("differs", "differ")}
    said: list[str] = []
    for verdict, count in counts.items():
        if count:
            one, many = words.get(verdict, (verdict, verdict))
            said.append(f"{count} {one if count == 1 else many}")
    return ", ".join(said)


def sentences(finding: JudgedClaim) -> str:
    """A difference in words."""
    here, there, why = (text.rstrip(".") for text in (finding.here, finding.there, finding.why))
    return f"Here: {here}. There: {there}. The rule: {why}."


def settings_of(finding: JudgedClaim) -> str:
    """One or two settings by name; of more, the first and their number."""
    first, more = finding.settings[:2], len(finding.settings) - 2
    return ", ".join(first) if more < 1 else f"{first[0]} and {more + 1} more"


def _commands(out: Path, results: Sequence[Result]) -> tuple[str, ...]:
    try:
        made = read_made(out)
    except UserError:
        made = None  # results may have been copied without the rest
    if made is not None and made.commands:
        return _distinct(shlex.join(str(word) for word in one.get("command", ())) for one in made.commands)
    return _distinct(shlex.join(result.command) for result in results)


def _remarks(results: Sequence[Result]) -> tuple[str, ...]:
    """Each remark, with the number of runs that make it."""
    counts: dict[str, int] = {}
    for result in results:
        for remark in dict.fromkeys(result.remarks):
            counts[remark] = counts.get(remark, 0) + 1
    return tuple(f"{remark} ({n} of {len(results)} runs)" for remark, n in counts.items())


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in texts if text))


# What a study has to draw: results that may be compared with each other, and a sketch of a run.
#
# Results of one framework, precision, batch and length are one kind, as in findings. Each kind has its own
# figures.


@dataclass(frozen=True)
class Material:
    """Results of one kind. Energies are those of `device`, which does the work, unless said otherwise."""

    out: Path
    kind: str  # as in keys of findings: torch-bf16; for a user's own program, its name
    suffix: str  # of files: the kind; empty if OUT has only one
    device: str
    results: tuple[Result, ...]
    shape: Shape | None = None  # layers and hidden size of the base; None: a user's own program

    @cached_property
    def base(self) -> list[Result]:
        """What all else is compared with: BERT's pre-training, if there is any."""
        found = [self.like_base(model, stage) for stage in STAGES for model in ("bert", "albert")]
        return next((each for each in found if each), None) or max(by_setting(self.results).values(), key=len)

    def of(self, model: str, stage: str) -> list[Result]:
        return [r for r in self.results if r.facts.get("model") == model and r.facts.get("stage") == stage]

    def like_base(self, model: str, stage: str) -> list[Result]:
        """Results with the base's shape."""
        return [result for result in self.of(model, stage) if shape_of(result) == self.shape]

    def variants(self) -> dict[str, list[Result]]:
        """By hidden size and layers; for a user's own program, by what varies."""
        if self.shape is None:
            return {_varied(each[0]): each for each in by_setting(sorted(self.results, key=varied)).values()}
        found = sorted(self.of("bert", "pretrain"), key=lambda result: shape_of(result)[::-1])
        return {variant_label(each[0]): each for each in by_setting(found).values()}

    @cached_property
    def sketch(self) -> Sketch:
        """The sketch of a run of the base; made from its recording, if none can be used."""
        why: list[str] = []
        for result in sorted(self.base, key=lambda one: one.number):
            for sketched in (self._kept, self._made):
                try:
                    found = sketched(result.name)
                except UserError as error:
                    why.append(str(error))
                    continue
                if found is not None and found.device == self.device:
                    return found
                if found is not None:
                    why.append(f"the sketch of {found.name} is of {found.device}, not of {self.device}")
        nothing = f"{self.base[0].setting} has neither a sketch nor a recording with events"
        raise NotDrawn(why[0] if why else nothing)

    def _kept(self, name: str) -> Sketch | None:
        return load_sketch(self.out, name)

    def _made(self, name: str) -> Sketch | None:
        path = self.out / RUNS / name
        if not path.is_dir():
            return None
        return sketch_of(name, Run.open(path))


def materials(out: Path, results: Sequence[Result]) -> list[Material]:
    """The kinds that OUT has, the one with the most runs first; then a user's own programs."""
    kinds = [
        Material(
            out,
            one.suffix,
            f"-{one.suffix}",
            one.device,
            tuple(work.result for work in one.works),
            one.main_shape("bert") or one.main_shape("albert"),
        )
        for one in sorted(groups(results), key=lambda one: -len(one.works))
    ]
    own: dict[str, list[Result]] = {}
    for result in results:
        if PROGRAM in result.facts:
            own.setdefault(str(result.facts[PROGRAM]), []).append(result)
    for program, each in own.items():
        device = working_device([result.step for result in each])
        if device is not None:
            suffix = "-" + re.sub(r"[^A-Za-z0-9_.+-]+", "_", program)
            kinds.append(Material(out, program, suffix, device, tuple(each)))
    return kinds if len(kinds) > 1 else [dataclasses.replace(one, suffix="") for one in kinds]


def variant_label(result: Result) -> str:
    return f"L{result.facts.get('layers')} H{result.facts.get('hidden')}"


def of_phase(footprint: Footprint, phase: str) -> Footprint:
    """One phase of a footprint. A device's total is what that phase took: idle belongs to no phase."""
    kept = pa.array([known == phase for known in footprint.rows["phase"].to_pylist()], pa.bool_())
    rows = footprint.rows.filter(kept)
    devices = rows["device"].to_pylist()
    energy_j = column(rows, "energy_j")
    totals = {
        device: dataclasses.replace(
            total,
            total_j=math.fsum(energy_j[[known == device for known in devices]].tolist()),
            idle_j=0.0,
            other_j=None,
            static_j=None,
        )
        for device, total in footprint.devices.items()
        if device in devices
    }
    return dataclasses.replace(footprint, rows=rows, devices=totals)


def _varied(result: Result) -> str:
    return ", ".join(f"{name} {value}" for name, value in values_of(result).items())
