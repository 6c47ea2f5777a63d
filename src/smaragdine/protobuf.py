"""The XPlane message, of tsl/profiler/protobuf/xplane.proto: the fields we read.

It is small: its descriptors are built at run time, so that neither TensorFlow nor a generated file is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

# message → (number, name, type); a type that is not of protobuf is a message of this table
Fields = Mapping[str, list[tuple[int, str, str]]]
FIELDS: Fields = {
    "XSpace": [(1, "planes", "repeated XPlane"), (2, "errors", "repeated string")],
    "XPlane": [
        (2, "name", "string"),
        (3, "lines", "repeated XLine"),
        (4, "event_metadata", "map XEventMetadata"),
        (5, "stat_metadata", "map XStatMetadata"),
        (6, "stats", "repeated XStat"),
    ],
    "XLine": [
        (1, "id", "int64"),
        (2, "name", "string"),
        (3, "timestamp_ns", "int64"),
        (4, "events", "repeated XEvent"),
    ],
    "XEvent": [
        (1, "metadata_id", "int64"),
        (2, "offset_ps", "data int64"),
        (3, "duration_ps", "int64"),
        (4, "stats", "repeated XStat"),
        (5, "num_occurrences", "data int64"),
    ],
    "XStat": [
        (1, "metadata_id", "int64"),
        (2, "double_value", "value double"),
        (3, "uint64_value", "value uint64"),
        (4, "int64_value", "value int64"),
        (5, "str_value", "value string"),
        (6, "bytes_value", "value bytes"),
        (7, "ref_value", "value uint64"),
    ],
    "XEventMetadata": [(2, "name", "string"), (4, "display_name", "string"), (5, "stats", "repeated XStat")],
    "XStatMetadata": [(2, "name", "string")],
}


@cache
def message_class() -> Any:
    return build_class("xplane", FIELDS, "XSpace")


def build_class(file_name: str, table: Fields, root: str) -> Any:
    """A message of a table, in a descriptor pool of its own: TensorFlow's may be in the same process."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    package = f"smaragdine.{file_name}"
    file = descriptor_pb2.FileDescriptorProto(
        name=f"smaragdine/{file_name}.proto", package=package, syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in table.items():
        built_message = file.message_type.add(name=message)
        oneofs: list[str] = []
        for number, name, words in fields:
            *before, kind = words.split()
            field = built_message.field.add(name=name, number=number, label=kinds.LABEL_OPTIONAL)
            if before in (["repeated"], ["map"]):
                field.label = kinds.LABEL_REPEATED
            elif before:
                if before[0] not in oneofs:
                    oneofs.append(before[0])
                    built_message.oneof_decl.add(name=before[0])
                field.oneof_index = oneofs.index(before[0])
            if before == ["map"]:
                entry = built_message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_INT64)
                entry.field.add(
                    name="value",
                    number=2,
                    label=kinds.LABEL_OPTIONAL,
                    type=kinds.TYPE_MESSAGE,
                    type_name=f".{package}.{kind}",
                )
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{package}.{message}.{entry.name}"
            elif kind in table:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                field.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{root}"))
