"""The fields we read of xla/service/hlo.proto.

Descriptors are built at run time, as in files/xplane_message.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from smaragdine.tracing.files.xplane_message import Fields, build_class

FIELDS: Fields = {
    "HloProto": [(1, "hlo_module", "HloModuleProto")],
    "HloModuleProto": [
        (1, "name", "string"),
        (3, "computations", "repeated HloComputationProto"),
        (6, "entry_computation_id", "int64"),
        (7, "schedule", "HloScheduleProto"),
    ],
    "HloScheduleProto": [(1, "sequences", "map InstructionSequence")],
    "InstructionSequence": [(1, "instruction_ids", "repeated int64")],
    "HloComputationProto": [
        (1, "name", "string"),
        (2, "instructions", "repeated HloInstructionProto"),
        (5, "id", "int64"),
        (6, "root_id", "int64"),
    ],
    "HloInstructionProto": [
        (1, "name", "string"),
        (2, "opcode", "string"),
        (7, "metadata", "OpMetadata"),
        (9, "parameter_number", "int64"),
        (13, "tuple_index", "int64"),
        (28, "custom_call_target", "string"),
        (35, "id", "int64"),
        (36, "operand_ids", "repeated int64"),
        (38, "called_computation_ids", "repeated int64"),
    ],
    "OpMetadata": [(1, "op_type", "string"), (2, "op_name", "string")],
}


@cache
def message_class() -> Any:
    return build_class("hlo", FIELDS, "HloProto")
