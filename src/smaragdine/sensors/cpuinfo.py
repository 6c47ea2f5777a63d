"""Which processor this is: model, sockets, cores, and how much memory it has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

UNKNOWN_MODEL = "unknown CPU"


@dataclass(frozen=True)
class CpuInfo:
    """The processor as this kernel sees it; in a virtual machine that is a part of the real one."""

    model: str
    sockets: Mapping[int, tuple[int, ...]]  # socket → its logical CPUs
    cores: Mapping[int, int]  # socket → its physical cores


def read_cpuinfo(proc_root: Path = Path("/proc")) -> CpuInfo:
    """From /proc/cpuinfo. Without "physical id" (ARM, some virtual machines) all CPUs are socket 0."""
    try:
        text = (proc_root / "cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    blocks = [block for block in _blocks(text) if block.get("processor", "").isdigit()]
    if not blocks:
        cpus = tuple(range(os.cpu_count() or 1))
        return CpuInfo(UNKNOWN_MODEL, {0: cpus}, {0: len(cpus)})
    sockets: dict[int, list[dict[str, str]]] = {}
    for block in blocks:
        sockets.setdefault(_number(block, "physical id", 0), []).append(block)
    return CpuInfo(
        model=_model(text, blocks[0]),
        sockets={s: tuple(sorted(int(b["processor"]) for b in sockets[s])) for s in sorted(sockets)},
        cores={s: _cores(sockets[s]) for s in sorted(sockets)},
    )


def read_memory_bytes(proc_root: Path = Path("/proc")) -> int:
    """MemTotal in bytes, which is what is installed less what the kernel keeps; 0 when it cannot be read."""
    try:
        for line in (proc_root / "meminfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _blocks(text: str) -> Iterator[dict[str, str]]:
    for paragraph in text.split("\n\n"):
        pairs = (line.partition(":") for line in paragraph.splitlines())
        yield {key.strip(): value.strip() for key, _, value in pairs}


def _cores(blocks: list[dict[str, str]]) -> int:
    """Physical cores of one socket that this kernel can use."""
    # "cpu cores" counts the whole socket even where a container shows only some of its CPUs; the core ids
    # repeat from die to die on some machines.
    stated = _number(blocks[0], "cpu cores", 0)
    if 0 < stated <= len(blocks):
        return stated
    ids = {block["core id"] for block in blocks if "core id" in block}
    return len(ids) or len(blocks)


def _model(text: str, block: Mapping[str, str]) -> str:
    if block.get("model name"):
        return block["model name"]
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("Model", "Hardware", "cpu model") and value.strip():
            return value.strip()
    if "CPU implementer" in block:
        return f"ARM implementer {block['CPU implementer']} part {block.get('CPU part', '?')}"
    return UNKNOWN_MODEL


def _number(block: Mapping[str, str], key: str, default: int) -> int:
    value = block.get(key, "")
    return int(value) if value.isdigit() else default
