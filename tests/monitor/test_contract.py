"""The contract: what is in the tree is what protoc makes of the .proto, and any gRPC client can use it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from smaragdine.daemon import views
from smaragdine.monitor.contract import monitor_pb2 as pb
from smaragdine.monitor.contract import service

ROOT = Path(__file__).parents[2]
CONTRACT = ROOT / "src" / "smaragdine" / "monitor" / "contract"


def test_generated_files_are_up_to_date(tmp_path: Path) -> None:
    """Another protoc words its files otherwise but means the same: compared as descriptors then."""
    pytest.importorskip("grpc_tools")
    from google.protobuf import descriptor_pb2

    subprocess.run([sys.executable, ROOT / "proto" / "generate.py", tmp_path], check=True)
    made, kept = ((folder / "monitor.binpb").read_bytes() for folder in (tmp_path, CONTRACT))
    parse = descriptor_pb2.FileDescriptorSet.FromString
    assert parse(made) == parse(kept), "run make proto"
    assert _names(tmp_path / "monitor_pb2.pyi") == _names(CONTRACT / "monitor_pb2.pyi"), "run make proto"


def _names(path: Path) -> list[str]:
    lines = (line.strip().split("(")[0] for line in path.read_text().splitlines())
    return sorted(line for line in lines if ":" in line or line.startswith("class "))


def test_every_call_has_a_path_and_messages() -> None:
    assert {name: method.streams for name, method in service.METHODS.items()} == {
        "Describe": False,
        "Start": False,
        "Stop": False,
        "Read": True,
        "List": False,
        "SetLimit": False,
        "Release": False,
        "Health": False,
    }
    assert service.METHODS["SetLimit"].path == "/smaragdine.v1.Monitor/SetLimit"
    assert service.METHODS["SetLimit"].request is pb.SetLimitRequest


def test_two_copies_of_the_contract_live_in_one_process() -> None:
    """A user's own generated code must not clash with ours."""
    spec = importlib.util.spec_from_file_location("another_copy", CONTRACT / "monitor_pb2.py")
    assert spec is not None
    assert spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    assert other.Note is not pb.Note
    assert other.Note.FromString(pb.Note(name="x").SerializeToString()).name == "x"


@pytest.mark.parametrize("number", [0, 5, 127, 128, 300, 16_383, 16_384, 2**32 - 1])
def test_columns_written_as_blocks_are_what_protobuf_reads(number: int) -> None:
    import numpy as np

    from smaragdine.daemon.log import Batch

    times = [-1, 0, 1_700_000_000_000_000_001]
    batch = Batch(
        1, np.array(times), np.array([number, 1, number], np.uint32), np.array([0.1, -2.5, float("inf")])
    )
    head = pb.ReadResponse(next_sequence=7).SerializeToString()
    read = pb.ReadResponse.FromString(head + views.encode_columns([batch, batch]))
    assert list(read.t_ns) == times * 2
    assert list(read.channel) == [number, 1, number] * 2
    assert list(read.value) == [0.1, -2.5, float("inf")] * 2
    assert read.next_sequence == 7
    assert views.encode_columns([]) == b""


def test_the_contract_is_in_the_package() -> None:
    """The descriptor set is data: a wheel without it would break at the first import."""
    assert (CONTRACT / "monitor.binpb").stat().st_size > 1000
    assert "*.binpb" not in (ROOT / ".gitignore").read_text()
