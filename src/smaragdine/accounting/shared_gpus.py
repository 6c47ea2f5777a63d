"""GPUs that were not the program's, or not its alone: a GPU's power is not split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from smaragdine.recording.reader import Recording


def unused_gpus(recording: Recording, run_ns: tuple[int, int]) -> list[str]:
    """GPUs that nobody used during the run: no process was seen on them, no kernel ran, no event is theirs.
    Where one of the first two was not looked at, the GPU may have been used."""
    quiet: dict[str, set[str]] = {}
    for series in recording.series("telemetry"):
        during = (series.t_ns >= run_ns[0]) & (series.t_ns <= run_ns[1])
        if during.any() and not series.value[during].any():
            quiet.setdefault(series.channel.device, set()).add(series.channel.quantity)
    silent = [device for device, said in quiet.items() if {"processes", "gpu_utilisation"} <= said]
    busy = set(recording.events["device"].cast(pa.string()).unique().to_pylist()) if silent else set[str]()
    return sorted(device for device in silent if device not in busy)


def shared_gpus(recording: Recording, begin_ns: int) -> list[str]:
    """A line for each."""
    gpus: list[dict[str, Any]] = recording.info.get("host", {}).get("gpus") or []
    said = [
        f"{gpu['device']}: MIG is on, and its power is that of all its instances together"
        for gpu in gpus
        if gpu.get("mig") and "device" in gpu
    ]
    if "run_id" not in recording.info:
        return said  # a block of a process that may be there itself
    for series in recording.series("telemetry"):
        before = np.flatnonzero(series.t_ns < begin_ns)
        if series.channel.quantity == "processes" and before.size and series.value[before[-1]] > 0:
            count = int(series.value[before[-1]])
            others = "another process was" if count == 1 else f"{count} other processes were"
            said.append(
                f"{series.channel.device}: {others} on it before the program; its energy is theirs, too"
            )
    return said
