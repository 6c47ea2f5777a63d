"""A /proc that shows the real machine's load under another processor."""

from __future__ import annotations

import os
from pathlib import Path


def two_sockets(root: Path) -> Path:
    """A tree for SMARAGDINE_PROC_ROOT: this machine's CPUs, dealt out to two sockets."""
    root.mkdir(parents=True)
    for name in ("stat", "meminfo", "loadavg"):
        (root / name).symlink_to(f"/proc/{name}")
    blocks = [
        f"processor\t: {cpu}\nmodel name\t: Test CPU\nphysical id\t: {cpu % 2}\ncore id\t: {cpu // 2}\n"
        for cpu in range(os.cpu_count() or 1)
    ]
    (root / "cpuinfo").write_text("\n".join(blocks))
    return root
