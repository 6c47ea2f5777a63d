"""The contract's calls: paths and messages, from the descriptor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smaragdine.monitor.contract import monitor_pb2

SERVICE = "smaragdine.v1.Monitor"


@dataclass(frozen=True)
class Method:
    name: str
    path: str
    request: Any  # message classes
    response: Any
    streams: bool  # whether many responses follow one request


def _methods() -> dict[str, Method]:
    service = monitor_pb2.DESCRIPTOR.services_by_name[SERVICE.rpartition(".")[2]]
    return {
        method.name: Method(
            method.name,
            f"/{SERVICE}/{method.name}",
            getattr(monitor_pb2, method.input_type.name),
            getattr(monitor_pb2, method.output_type.name),
            method.server_streaming,
        )
        for method in service.methods
    }


METHODS = _methods()
