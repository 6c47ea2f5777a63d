"""Compile the contract into a folder: `python proto/generate.py src/smaragdine/monitor/contract`.

Needs grpcio-tools. A test compares what it makes with what is in the tree.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).parent
FILE = PROTO / "smaragdine" / "v1" / "monitor.proto"
# protoc's types are neither in our format nor complete.
HEAD = """\
# Made by `make proto`. Do not edit.
# pyright: reportMissingTypeArgument=false
# ruff: noqa
# fmt: off
"""


def generate(target: Path) -> None:
    """Write monitor.binpb and monitor_pb2.pyi."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--descriptor_set_out={folder}/monitor.binpb", f"--pyi_out={folder}"]
        if protoc.main(["protoc", f"-I{PROTO}", *outputs, str(FILE)]) != 0:
            sys.exit(f"{FILE} does not compile")
        (target / "monitor.binpb").write_bytes((Path(folder) / "monitor.binpb").read_bytes())
        types = (Path(folder) / "smaragdine" / "v1" / "monitor_pb2.pyi").read_text()
        (target / "monitor_pb2.pyi").write_text(HEAD + types)


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
