"""All that a page of findings says, in one object: the same for HTML, Markdown and JSON."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smaragdine.accounting.arithmetic import adding_devices
from smaragdine.errors import UserError
from smaragdine.report.study.cells import Table
from smaragdine.study.findings import Finding
from smaragdine.study.folder import read_made
from smaragdine.study.results import Result

NOTES = "notes.md"
VERDICTS = ("agrees", "differs", "not comparable")
_SECTION = re.compile(r"^##\s+`?([^`\n]+?)`?\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Picture:
    """A figure that was drawn."""

    name: str  # of its files
    number: int  # in the paper
    title: str
    of: str  # kind of results; of one setting, its name
    there: str  # what the paper's showed
    alt: str
    svg: bytes
    wide: bool  # as a page, not a column


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
    findings: tuple[Finding, ...]
    pictures: tuple[Picture, ...]
    left_out: Mapping[str, str]  # figure → why the results do not allow it
    tables: tuple[Table, ...]
    notes: Mapping[str, str]  # what the user wrote: key of a finding → text; "": before all keys


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
    """OUT/notes.md by its second headings: what a person wrote about a finding outlives every redrawing."""
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


def note_key(finding: Finding, notes: Mapping[str, str]) -> str | None:
    """Its own key, or the longest that its key begins with: one note may serve all precisions."""
    found = [key for key in notes if key and (finding.key == key or finding.key.startswith(f"{key}-"))]
    return max(found, key=len, default=None)


def differing(document: Document) -> list[Finding]:
    return [finding for finding in document.findings if finding.verdict == "differs"]


def spare_notes(document: Document) -> dict[str, str]:
    """Notes that stand at no difference: nothing that a person wrote is lost."""
    used = {note_key(finding, document.notes) for finding in differing(document)}
    return {key: text for key, text in document.notes.items() if key and key not in used}


def counted(findings: Sequence[Finding]) -> str:
    """12 agree, 3 differ, 2 not comparable."""
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in VERDICTS}
    words = {"agrees": ("agrees", "agree"), "differs": ("differs", "differ")}
    said: list[str] = []
    for verdict, count in counts.items():
        if count:
            one, many = words.get(verdict, (verdict, verdict))
            said.append(f"{count} {one if count == 1 else many}")
    return ", ".join(said)


def sentences(finding: Finding) -> str:
    """A difference in words."""
    here, there, why = (text.rstrip(".") for text in (finding.here, finding.there, finding.why))
    return f"Here: {here}. There: {there}. The rule: {why}."


def settings_of(finding: Finding) -> str:
    """One or two by name; of many, the first."""
    first, more = finding.settings[:2], len(finding.settings) - 2
    return ", ".join(first) if more < 1 else f"{first[0]} and {more + 1} more"


def _commands(out: Path, results: Sequence[Result]) -> tuple[str, ...]:
    try:
        made = read_made(out)
    except UserError:
        made = None  # results may be carried about without the rest
    if made is not None and made.commands:
        return _distinct(shlex.join(str(word) for word in one.get("command", ())) for one in made.commands)
    return _distinct(shlex.join(result.command) for result in results)


def _remarks(results: Sequence[Result]) -> tuple[str, ...]:
    """Each with how many runs say it."""
    counts: dict[str, int] = {}
    for result in results:
        for remark in dict.fromkeys(result.remarks):
            counts[remark] = counts.get(remark, 0) + 1
    return tuple(f"{remark} ({n} of {len(results)} runs)" for remark, n in counts.items())


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in texts if text))
