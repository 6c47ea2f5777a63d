"""The XPlane message, of tsl/profiler/protobuf/xplane.proto: the fields we read.

It is small: its descriptors are built at run time, so that neither TensorFlow nor a generated file is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

# message → its fields, as in a .proto file. A type that protobuf does not know is one of these messages, and
# a word before it that is neither `repeated` nor `map` the name of a oneof. Keys of maps are int64.
Fields = Mapping[str, str]
FIELDS: Fields = {
    "XSpace": "repeated XPlane planes = 1; repeated string errors = 2",
    "XPlane": """
        string name = 2; repeated XLine lines = 3; map XEventMetadata event_metadata = 4;
        map XStatMetadata stat_metadata = 5; repeated XStat stats = 6""",
    "XLine": "int64 id = 1; string name = 2; int64 timestamp_ns = 3; repeated XEvent events = 4",
    "XEvent": """
        int64 metadata_id = 1; data int64 offset_ps = 2; int64 duration_ps = 3; repeated XStat stats = 4;
        data int64 num_occurrences = 5""",
    "XStat": """
        int64 metadata_id = 1; value double double_value = 2; value uint64 uint64_value = 3;
        value int64 int64_value = 4; value string str_value = 5; value bytes bytes_value = 6;
        value uint64 ref_value = 7""",
    "XEventMetadata": "string name = 2; string display_name = 4; repeated XStat stats = 5",
    "XStatMetadata": "string name = 2",
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
        for words in fields.split(";"):
            *before, kind, name, _, number = words.split()
            field = built_message.field.add(name=name, number=int(number), label=kinds.LABEL_OPTIONAL)
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


def varint(number: int) -> bytes:
    """A whole number as it is on the wire: seven bits a byte, the lowest first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
