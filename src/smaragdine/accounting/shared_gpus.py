"""GPUs that were not the program's alone: a GPU's power is not split, so who else was there is said."""

from __future__ import annotations

from typing import Any

import numpy as np

from smaragdine.recording.reader import Recording


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
