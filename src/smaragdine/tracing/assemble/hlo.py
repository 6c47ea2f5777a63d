"""The programs that XLA compiled, as an XPlane file holds them: which instruction came from where.

The fields we read of xla/service/hlo.proto; descriptors are built at run time, as in files/xplane_message.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from smaragdine.tracing.files.xplane_message import Fields, build_class

FIELDS: Fields = {
    "HloProto": [(1, "hlo_module", "HloModuleProto")],
    "HloModuleProto": [(3, "computations", "repeated HloComputationProto")],
    "HloComputationProto": [
        (2, "instructions", "repeated HloInstructionProto"),
        (5, "id", "int64"),
        (6, "root_id", "int64"),
    ],
    "HloInstructionProto": [
        (1, "name", "string"),
        (2, "opcode", "string"),
        (7, "metadata", "OpMetadata"),
        (35, "id", "int64"),
        (38, "called_computation_ids", "repeated int64"),
    ],
    "OpMetadata": [(1, "op_type", "string"), (2, "op_name", "string")],
}

# What XLA adds by itself, to move data where it needs it.
_MOVES = re.compile(r"copy|bitcast|tuple|get-tuple-element|parameter|constant|transpose")
_PROGRAM = re.compile(r"\((\d+)\)$")
_PLANE = "/host:metadata"


@dataclass(frozen=True)
class Origin:
    op_name: str  # "" where XLA kept none
    opcode: str
    is_tensorflow: bool

    @property
    def is_move(self) -> bool:
        return _MOVES.match(self.opcode) is not None


@cache
def message_class() -> Any:
    return build_class("hlo", FIELDS, "HloProto")


def programs(space: Any) -> dict[int, dict[str, Origin]]:
    """program_id → HLO operation → where it came from. Module names repeat, identities do not."""
    from google.protobuf.message import DecodeError

    found: dict[int, dict[str, Origin]] = {}
    for plane in space.planes:
        if plane.name != _PLANE:
            continue
        for metadata in plane.event_metadata.values():
            number = _PROGRAM.search(metadata.name)
            for stat in metadata.stats:
                if number is None or not stat.bytes_value:
                    continue
                proto = message_class()()
                try:
                    proto.ParseFromString(stat.bytes_value)
                except DecodeError:
                    continue  # its operations stay without a path, and that is counted
                found[int(number[1])] = _origins(proto.hlo_module)
    return found


def _origins(module: Any) -> dict[str, Origin]:
    computations = {computation.id: computation for computation in module.computations}
    origins: dict[str, Origin] = {}
    for computation in module.computations:
        for instruction in computation.instructions:
            origin = _product(instruction, _origin(instruction, computations), computations)
            origins[instruction.name] = origin
            # Kernels on a GPU are called after the instruction, in letters that C allows.
            origins.setdefault(re.sub(r"[.-]", "_", instruction.name), origin)
    return origins


def _product(instruction: Any, origin: Origin, computations: dict[int, Any]) -> Origin:
    """The gradient of a weight is a product, transposed: XLA makes one of both, called after the latter."""
    root = _root(instruction, computations) if instruction.opcode == "fusion" else instruction
    stem, _, operation = origin.op_name.rpartition("/")
    if root is not None and root.opcode == "dot" and operation == "transpose":
        return replace(origin, op_name=f"{stem}/dot_general")
    return origin


def _root(instruction: Any, computations: dict[int, Any]) -> Any:
    for called in instruction.called_computation_ids[:1]:
        computation = computations.get(called)
        if computation is None:
            return None
        for each in computation.instructions:
            if each.id == computation.root_id:
                return each
    return None


def _origin(instruction: Any, computations: dict[int, Any], depth: int = 0) -> Origin:
    """A fusion is where its root is. The compiler rewrites some roots and forgets where they came from, but
    not what they call: a reduction's sum."""
    metadata = instruction.metadata
    origin = Origin(metadata.op_name, instruction.opcode, bool(metadata.op_type))
    if _is_path(origin) or depth > 8:
        return origin
    root = _root(instruction, computations)
    if root is not None:
        inner = _origin(root, computations, depth + 1)
        if inner.op_name or instruction.opcode == "fusion":
            return inner
    return Origin("", origin.opcode, origin.is_tensorflow)


def _is_path(origin: Origin) -> bool:
    """A bare word is, in JAX, the name of an argument that is copied (`params['w']`)."""
    return bool(origin.op_name) and (origin.is_tensorflow or "/" in origin.op_name)
