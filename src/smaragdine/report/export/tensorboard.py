"""Exports scalars for TensorBoard: energy per epoch and per step, power over time.

We write the event file without TensorFlow: records with a length and two checksums, each of them one of two
small messages.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from smaragdine.accounting.power import coarse, within
from smaragdine.accounting.spans import MORE
from smaragdine.errors import UserError
from smaragdine.protobuf import Fields, build_class
from smaragdine.recording.reader import Recording
from smaragdine.report.export.selection import Selection

# From tensorflow/core/util/event.proto and framework/summary.proto: only fields we write.
FIELDS: Fields = {
    "Event": "double wall_time = 1; int64 step = 2; what string file_version = 3; what Summary summary = 5",
    "Summary": "repeated Value value = 1",
    "Value": "string tag = 1; value float simple_value = 2",
}
_MOST_POINTS = 5_000  # points of power; TensorBoard shows a thousand
_MOST_FOLDERS = 2_000
_LOG_FILE = re.compile(r"events\.out\.tfevents\.(\d{10})\.")


@cache
def event_class() -> Any:
    return build_class("tensorboard", FIELDS, "Event")


def file_name(recording: Recording) -> str:
    """Always the same for one recording, so that exporting it twice does not show it twice."""
    begin_s = (
        int(recording.info.get("begin_ns") or recording.info["clock"]["begin"]["wall_ns"]) // 1_000_000_000
    )
    return f"events.out.tfevents.{begin_s:010d}.{recording.info.get('run_id', 'run')}.smaragdine"


def devices_with_power(chosen: Selection) -> list[str]:
    known = [
        name
        for name, device in chosen.run.summary.devices.items()
        if device.scope == "device" and device.energy_j is not None and chosen.wants(name)
    ]
    if not known:
        raise UserError(f"{chosen.run.recording.path} has no power to show", remedy="See smaragdine doctor")
    return known


def write_tensorboard(chosen: Selection, path: Path) -> None:
    with path.open("wb") as file:
        first = event_class()(wall_time=chosen.run.summary.begin_ns * 1e-9, file_version="brain.Event:2")
        file.write(_record(first.SerializeToString()))
        for t_ns, step, tag, value in _scalars(chosen):
            event = event_class()(wall_time=t_ns * 1e-9, step=step)
            event.summary.value.add(tag=tag, simple_value=value)
            file.write(_record(event.SerializeToString()))


def _scalars(chosen: Selection) -> Iterator[tuple[int, int, str, float]]:
    """Time, step, tag and value. Power's step is the millisecond of the run."""
    begin_ns, end_ns = chosen.run.summary.begin_ns, chosen.run.summary.end_ns
    traces = chosen.run.traces
    known = devices_with_power(chosen)
    for number, epoch in enumerate(chosen.run.summary.epochs):
        for device in known:
            energy_j = epoch.devices[device].energy_j
            if energy_j is not None:
                index = number if epoch.index is None else epoch.index
                yield epoch.end_ns, index, f"energy_per_epoch_j/{device}", energy_j
    # What an epoch or an evaluation adds to a step would be a spike.
    steps = [span for span, kind in chosen.run.announced_steps if kind != MORE]
    sources = list(dict.fromkeys((span.rank or 0, span.source) for span in steps))
    for span in steps:
        # Several ranks, or a second optimizer, count their own steps.
        source = sources.index((span.rank or 0, span.source))
        for device in known:
            if traces[device].covered_s(span.begin_ns, span.end_ns) > 0 and span.index is not None:
                tag = f"energy_per_step_j/{device}{f'/{source}' if source else ''}"
                yield span.end_ns, span.index, tag, traces[device].energy_j(span.begin_ns, span.end_ns)
    for device in known:
        drawn = coarse(within(traces[device], [(begin_ns, end_ns)]), _MOST_POINTS)
        for t_ns, power_w in zip(drawn.end_ns.tolist(), drawn.power_w.tolist(), strict=True):
            yield t_ns, (t_ns - begin_ns) // 1_000_000, f"power_w/{device}", power_w


def log_folder(recording: Recording) -> Path | None:
    """The folder in which the program itself wrote TensorBoard files: their names have a time within the run.

    Looks below the folder in which the program ran, if it is on this machine. If there are several, returns
    what they have in common.
    """
    where: str | None = recording.info.get("working_folder")
    begin_ns, end_ns = recording.info.get("begin_ns"), recording.info.get("end_ns")
    if not where or not begin_ns or not end_ns or not Path(where).is_dir():
        return None
    found: list[str] = []
    for looked, (folder, folders, files) in enumerate(os.walk(where)):
        folders[:] = sorted(
            name for name in folders if not name.startswith((".", "node_modules", "site-packages"))
        )
        written = [
            int(match[1]) for name in files if (match := _LOG_FILE.match(name)) and ".smaragdine" not in name
        ]
        if any(begin_ns // 1_000_000_000 <= t_s <= end_ns // 1_000_000_000 for t_s in written):
            found.append(folder)
        if looked >= _MOST_FOLDERS:
            break
    return Path(os.path.commonpath(found)) if found else None


def _record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + struct.pack("<I", _masked(length)) + content + struct.pack("<I", _masked(content))


def _masked(content: bytes) -> int:
    crc = _crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc32c(content: bytes) -> int:
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _crc_table() -> list[int]:
    """For Castagnoli's polynomial, which zlib does not have."""
    table: list[int] = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table
