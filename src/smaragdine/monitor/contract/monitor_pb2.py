"""The contract's messages, made from protoc's descriptor set when they are first used.

protoc's own Python code demands a protobuf at least as new as the protoc that wrote it; a descriptor set
demands nothing, so the user's frameworks choose the version. Types are in monitor_pb2.pyi.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

# In a pool of its own, it does not meet another copy of the contract in the same process.
_pool = descriptor_pool.DescriptorPool()
_files = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("monitor.binpb").read_bytes())
for _file in _files.file:
    _pool.AddSerializedFile(_file.SerializeToString())
DESCRIPTOR = _pool.FindFileByName("smaragdine/v1/monitor.proto")

for _name, _message in DESCRIPTOR.message_types_by_name.items():
    globals()[_name] = message_factory.GetMessageClass(_message)
for _name, _enum in DESCRIPTOR.enum_types_by_name.items():
    globals()[_name] = EnumTypeWrapper(_enum)
    globals().update({value.name: value.number for value in _enum.values})
