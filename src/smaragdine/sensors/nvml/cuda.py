"""Which GPUs a program sees: CUDA_VISIBLE_DEVICES read the way CUDA reads it.

Run as a script, it prints the PCI bus id of every CUDA device in CUDA's own order, one a line. That happens
in a process of its own, so that ours never loads the driver library. The script is standard library alone
because it runs without site packages.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ASK_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Visible:
    """The positions of the visible GPUs in the given list, and which entry ended CUDA's list, and why."""

    positions: list[int]
    ended_by: str = ""


def visible_gpus(
    value: str,
    uuids: Sequence[str],
    ordinals: Sequence[int] | None,
    mig_parent: Callable[[str], int | None],
) -> Visible:
    """The GPUs that CUDA_VISIBLE_DEVICES=`value` names, as positions in `uuids`, in the order named.

    `ordinals[n]` is the position of CUDA device n (None: unknown, so indices cannot be resolved).
    `mig_parent` gives the position of the GPU that a MIG entry is cut from. As in CUDA (seen with driver
    580), the first invalid entry ends the list, and so does one of another form than the first. A GPU that is
    named twice leaves none.
    """
    positions: list[int] = []
    forms: set[str] = set()
    for entry in value.split(","):
        form = _form(entry)
        forms.add(form)
        position = _position(form, entry.rstrip(), uuids, ordinals, mig_parent) if len(forms) == 1 else None
        if position is None:
            return Visible(positions, f"no GPU {entry.strip()!r}" if entry.strip() else "")
        if position not in positions:
            positions.append(position)
        elif form != "MIG":
            return Visible([], f"the GPU {entry.strip()!r} twice")
    return Visible(positions)


def has_indices(value: str) -> bool:
    """Whether resolving `value` needs CUDA's device order."""
    return _form(value.split(",")[0]) == "index"


def bus_key(pci_bus_id: str) -> tuple[int, int, int]:
    """(domain, bus, device) of a PCI bus id: NVML writes eight digits of domain, CUDA four."""
    domain, bus, rest = pci_bus_id.strip().split(":")
    return int(domain, 16), int(bus, 16), int(rest.split(".")[0], 16)


def cuda_bus_ids(device_order: str | None) -> list[str] | None:
    """PCI bus ids of all GPUs in CUDA's order; None when CUDA cannot be asked."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    }
    if device_order:
        environment["CUDA_DEVICE_ORDER"] = device_order
    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-S", __file__],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.split() if answer.returncode == 0 else None


def _form(entry: str) -> str:
    """How an entry names its GPU: `index` (read as by strtol: blanks, a sign, anything after), GPU, MIG."""
    if re.match(r"\s*[+-]?\d", entry):
        return "index"
    return entry[:3] if entry.startswith(("GPU-", "MIG-")) else ""


def _position(
    form: str,
    entry: str,
    uuids: Sequence[str],
    ordinals: Sequence[int] | None,
    mig_parent: Callable[[str], int | None],
) -> int | None:
    number = re.match(r"\s*([+-]?\d+)", entry)
    if form == "index" and number is not None:
        ordinal = int(number[1])
        return ordinals[ordinal] if ordinals is not None and 0 <= ordinal < len(ordinals) else None
    if form == "MIG":
        return mig_parent(entry)
    if form != "GPU" or entry == "GPU-":
        return None
    matches = [n for n, uuid in enumerate(uuids) if uuid.lower().startswith(entry.lower())]
    return matches[0] if len(matches) == 1 else None


def _ask_driver() -> list[str]:
    """PCI bus ids in CUDA's order. This makes no context, so it takes no GPU memory."""
    driver = ctypes.CDLL("libcuda.so.1")

    def check(status: int) -> None:
        if status != 0:
            raise OSError(f"CUDA driver error {status}")

    count = ctypes.c_int()
    check(driver.cuInit(0))
    check(driver.cuDeviceGetCount(ctypes.byref(count)))
    bus_ids: list[str] = []
    for ordinal in range(count.value):
        device = ctypes.c_int()
        buffer = ctypes.create_string_buffer(32)
        check(driver.cuDeviceGet(ctypes.byref(device), ordinal))
        check(driver.cuDeviceGetPCIBusId(buffer, len(buffer), device))
        bus_ids.append(buffer.value.decode())
    return bus_ids


if __name__ == "__main__":
    try:
        print("\n".join(_ask_driver()))
    except OSError as error:
        sys.exit(str(error))
