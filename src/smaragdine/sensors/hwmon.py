"""Power and energy as hwmon chips report them: boards, regulators, supplies, some GPUs.

The maker of the board chooses what such a chip sees. It may contain other devices, so we never add it up.
"""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smaragdine.clock import SYSTEM, Clock
from smaragdine.sensors.base import Absent, Channel, Found, Kind
from smaragdine.sensors.processes import DescriptorSensor, OpenChannel, attribute_text, open_decimal

ROOT = Path("/sys/class/hwmon")
DEFAULT_PERIOD_MS = 100.0

_ATTRIBUTE = re.compile(r"(?P<what>power|energy)(?P<index>\d+)_(?P<how>input|average)")


@dataclass(frozen=True)
class Chip:
    """A hwmon folder, and the name that is unique among the chips with power or energy."""

    path: Path
    name: str
    attributes: tuple[str, ...]


def open_sensors(*, root: Path = ROOT, clock: Clock = SYSTEM) -> Found:
    """Open one sensor per chip: each has its own update period. To have no chip is normal; not reported."""
    found = Found()
    try:
        chips = find_chips(root)
    except FileNotFoundError:
        return found
    except OSError as error:
        remedy = "check that the folder is readable"
        found.absent.append(Absent("hwmon power", f"{error.filename or root}: {error.strerror}", remedy))
        return found
    for chip in chips:
        opened: list[OpenChannel] = []
        for attribute, channel in _channels(chip):
            try:
                path = chip.path / attribute
                opened.append(OpenChannel(channel, open_decimal(path), 1e6, path))
            except OSError as error:
                found.absent.append(_unreadable(channel, error))
        if opened:
            period_ns = int(min(item.channel.period_ms for item in opened) * 1e6)
            found.sensors.append(DescriptorSensor(opened, period_ns=period_ns, lane="hwmon", clock=clock))
    if found.sensors:
        found.facts["hwmon"] = [channel.device for sensor in found.sensors for channel in sensor.channels()]
    return found


def find_chips(root: Path) -> list[Chip]:
    folders = sorted(
        (entry for entry in root.iterdir() if re.fullmatch(r"hwmon\d+", entry.name) and entry.is_dir()),
        key=lambda entry: int(entry.name.removeprefix("hwmon")),
    )
    chips = [
        Chip(folder, _slug(attribute_text(folder / "name")) or folder.name, attributes)
        for folder in folders
        if (attributes := _attributes(folder))
    ]
    count = Counter(chip.name for chip in chips)
    seen: Counter[str] = Counter()
    unique: list[Chip] = []
    for chip in chips:
        seen[chip.name] += 1
        name = f"{chip.name}#{seen[chip.name]}" if count[chip.name] > 1 else chip.name
        unique.append(Chip(chip.path, name, chip.attributes))
    return unique


def _attributes(folder: Path) -> tuple[str, ...]:
    """Attribute names in natural order. Of an average and an input with one index, only the average."""
    found: dict[tuple[str, int], str] = {}
    for entry in folder.iterdir():
        match = _ATTRIBUTE.fullmatch(entry.name)
        if not match or (match["what"], match["how"]) == ("energy", "average"):
            continue
        key = (match["what"], int(match["index"]))
        if match["how"] == "average" or key not in found:
            found[key] = entry.name
    return tuple(found[key] for key in sorted(found))


def _channels(chip: Chip) -> Iterator[tuple[str, Channel]]:
    update_ms = _milliseconds(chip.path / "update_interval")
    taken: set[tuple[str, str]] = set()
    for attribute in chip.attributes:
        match = _ATTRIBUTE.fullmatch(attribute)
        assert match is not None
        quantity, plain = match["what"], f"{match['what']}{match['index']}"
        label = _slug(attribute_text(chip.path / f"{plain}_label")) or plain
        if (quantity, label) in taken:
            label = f"{label}-{plain}"
        taken.add((quantity, label))
        detail, window_ms, kind = f"{chip.path.name}/{attribute}", None, "counter"
        if quantity == "power":
            kind: Kind = "sample"
            if match["how"] == "average":
                window_ms = _milliseconds(chip.path / f"{plain}_average_interval")
                if (chip.path / f"{plain}_input").exists():
                    detail += f" ({plain}_input not read: the same power without its window)"
            else:
                window_ms = update_ms
        yield (
            attribute,
            Channel(
                device=f"hwmon:{chip.name}/{label}",
                quantity=quantity,
                unit="W" if quantity == "power" else "J",
                kind=kind,
                provenance="measured",
                period_ms=update_ms or DEFAULT_PERIOD_MS,
                sensor="hwmon",
                scope="whole",
                window_ms=window_ms,
                detail=detail,
            ),
        )


def _unreadable(channel: Channel, error: OSError) -> Absent:
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy = f"run as root, or `sudo chmod a+r {error.filename}` until the next boot"
        return Absent(channel.name, f"{error.filename}: permission denied", remedy)
    remedy = "the chip may be asleep or not wired; see `dmesg` for its driver's message"
    return Absent(channel.name, f"{error.filename}: {error.strerror}", remedy)


def _milliseconds(path: Path) -> float | None:
    try:
        value_ms = float(attribute_text(path))
    except ValueError:
        return None
    return value_ms if value_ms > 0 else None


def _slug(text: str) -> str:
    """A name without blanks or slashes, which separate the parts of a channel's name."""
    return re.sub(r"[\s/]+", "-", text)
