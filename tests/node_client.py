"""The example client for Node, run as a user would; npm fetches its packages once."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
EXAMPLE = REPOSITORY / "examples" / "node"
PROTO = REPOSITORY / "proto" / "smaragdine" / "v1" / "monitor.proto"
CACHE = REPOSITORY / ".cache" / "node"


def node_command(address: str, pid: int, *words: str) -> list[str]:
    """`node read.mjs …` with its packages installed; the test is skipped where that cannot be."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE.parent / ".gitignore").write_text("*\n")
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = (EXAMPLE / "package.json").read_text()
        done = CACHE / "installed"
        if not done.exists() or done.read_text() != wanted:
            shutil.copy(EXAMPLE / "package.json", CACHE)
            try:
                fetched = subprocess.run(
                    [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"],
                    cwd=CACHE,
                    capture_output=True,
                    text=True,
                    timeout=180,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                pytest.skip("npm does not answer")
            if fetched.returncode != 0:
                pytest.skip(f"npm cannot fetch the packages: {fetched.stderr.strip()[-200:]}")
            done.write_text(wanted)
        # Next to its packages, where node looks for them.
        shutil.copy(EXAMPLE / "read.mjs", CACHE)
    return [node, str(CACHE / "read.mjs"), str(pid), "--address", address, "--proto", str(PROTO), *words]


def read_with_node(address: str, pid: int, *words: str) -> dict[str, Any]:
    """What it prints with --json: channels with energy_j, first and last value, first_t_ns, last_t_ns."""
    done = subprocess.run(
        node_command(address, pid, "--json", *words),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
