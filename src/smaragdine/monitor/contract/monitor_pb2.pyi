# Made by `make proto`. Do not edit.
# pyright: reportMissingTypeArgument=false
# ruff: noqa
# fmt: off
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_COUNTER: _ClassVar[Kind]
    KIND_SAMPLE: _ClassVar[Kind]
    KIND_LEVEL: _ClassVar[Kind]

class Provenance(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROVENANCE_UNSPECIFIED: _ClassVar[Provenance]
    PROVENANCE_MEASURED: _ClassVar[Provenance]
    PROVENANCE_ESTIMATED: _ClassVar[Provenance]
    PROVENANCE_REPLAYED: _ClassVar[Provenance]

class Scope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCOPE_UNSPECIFIED: _ClassVar[Scope]
    SCOPE_DEVICE: _ClassVar[Scope]
    SCOPE_PART: _ClassVar[Scope]
    SCOPE_WHOLE: _ClassVar[Scope]

class LimitKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIMIT_KIND_UNSPECIFIED: _ClassVar[LimitKind]
    LIMIT_KIND_POWER: _ClassVar[LimitKind]
    LIMIT_KIND_GRAPHICS_CLOCK: _ClassVar[LimitKind]
    LIMIT_KIND_MEMORY_CLOCK: _ClassVar[LimitKind]
    LIMIT_KIND_APPLICATION_CLOCKS: _ClassVar[LimitKind]
KIND_UNSPECIFIED: Kind
KIND_COUNTER: Kind
KIND_SAMPLE: Kind
KIND_LEVEL: Kind
PROVENANCE_UNSPECIFIED: Provenance
PROVENANCE_MEASURED: Provenance
PROVENANCE_ESTIMATED: Provenance
PROVENANCE_REPLAYED: Provenance
SCOPE_UNSPECIFIED: Scope
SCOPE_DEVICE: Scope
SCOPE_PART: Scope
SCOPE_WHOLE: Scope
LIMIT_KIND_UNSPECIFIED: LimitKind
LIMIT_KIND_POWER: LimitKind
LIMIT_KIND_GRAPHICS_CLOCK: LimitKind
LIMIT_KIND_MEMORY_CLOCK: LimitKind
LIMIT_KIND_APPLICATION_CLOCKS: LimitKind

class Channel(_message.Message):
    __slots__ = ("number", "device", "quantity", "unit", "kind", "provenance", "period_ms", "sensor", "scope", "window_ms", "wraps_at", "detail")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    QUANTITY_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    SENSOR_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    WRAPS_AT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    number: int
    device: str
    quantity: str
    unit: str
    kind: Kind
    provenance: Provenance
    period_ms: float
    sensor: str
    scope: Scope
    window_ms: float
    wraps_at: float
    detail: str
    def __init__(self, number: _Optional[int] = ..., device: _Optional[str] = ..., quantity: _Optional[str] = ..., unit: _Optional[str] = ..., kind: _Optional[_Union[Kind, str]] = ..., provenance: _Optional[_Union[Provenance, str]] = ..., period_ms: _Optional[float] = ..., sensor: _Optional[str] = ..., scope: _Optional[_Union[Scope, str]] = ..., window_ms: _Optional[float] = ..., wraps_at: _Optional[float] = ..., detail: _Optional[str] = ...) -> None: ...

class Absent(_message.Message):
    __slots__ = ("channel", "reason", "remedy")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    channel: str
    reason: str
    remedy: str
    def __init__(self, channel: _Optional[str] = ..., reason: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("version", "channels", "absent", "facts_json", "limits", "may_control", "finest_counter_ms")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    FACTS_JSON_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MAY_CONTROL_FIELD_NUMBER: _ClassVar[int]
    FINEST_COUNTER_MS_FIELD_NUMBER: _ClassVar[int]
    version: str
    channels: _containers.RepeatedCompositeFieldContainer[Channel]
    absent: _containers.RepeatedCompositeFieldContainer[Absent]
    facts_json: str
    limits: _containers.RepeatedCompositeFieldContainer[LimitRange]
    may_control: bool
    finest_counter_ms: float
    def __init__(self, version: _Optional[str] = ..., channels: _Optional[_Iterable[_Union[Channel, _Mapping]]] = ..., absent: _Optional[_Iterable[_Union[Absent, _Mapping]]] = ..., facts_json: _Optional[str] = ..., limits: _Optional[_Iterable[_Union[LimitRange, _Mapping]]] = ..., may_control: _Optional[bool] = ..., finest_counter_ms: _Optional[float] = ...) -> None: ...

class StartRequest(_message.Message):
    __slots__ = ("pid", "period_ms", "job", "include_past")
    PID_FIELD_NUMBER: _ClassVar[int]
    PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_PAST_FIELD_NUMBER: _ClassVar[int]
    pid: int
    period_ms: float
    job: str
    include_past: bool
    def __init__(self, pid: _Optional[int] = ..., period_ms: _Optional[float] = ..., job: _Optional[str] = ..., include_past: _Optional[bool] = ...) -> None: ...

class StartResponse(_message.Message):
    __slots__ = ("session_id", "sequence", "begin_ns", "channels", "period_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    sequence: int
    begin_ns: int
    channels: _containers.RepeatedCompositeFieldContainer[Channel]
    period_ms: float
    def __init__(self, session_id: _Optional[str] = ..., sequence: _Optional[int] = ..., begin_ns: _Optional[int] = ..., channels: _Optional[_Iterable[_Union[Channel, _Mapping]]] = ..., period_ms: _Optional[float] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ("end_ns", "energies", "sequence")
    END_NS_FIELD_NUMBER: _ClassVar[int]
    ENERGIES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    end_ns: int
    energies: _containers.RepeatedCompositeFieldContainer[DeviceEnergy]
    sequence: int
    def __init__(self, end_ns: _Optional[int] = ..., energies: _Optional[_Iterable[_Union[DeviceEnergy, _Mapping]]] = ..., sequence: _Optional[int] = ...) -> None: ...

class DeviceEnergy(_message.Message):
    __slots__ = ("device", "energy_j", "own_j", "provenance", "basis")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ENERGY_J_FIELD_NUMBER: _ClassVar[int]
    OWN_J_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    BASIS_FIELD_NUMBER: _ClassVar[int]
    device: str
    energy_j: float
    own_j: float
    provenance: Provenance
    basis: str
    def __init__(self, device: _Optional[str] = ..., energy_j: _Optional[float] = ..., own_j: _Optional[float] = ..., provenance: _Optional[_Union[Provenance, str]] = ..., basis: _Optional[str] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("session_id", "sequence", "follow", "every_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    EVERY_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    sequence: int
    follow: bool
    every_ms: float
    def __init__(self, session_id: _Optional[str] = ..., sequence: _Optional[int] = ..., follow: _Optional[bool] = ..., every_ms: _Optional[float] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("next_sequence", "t_ns", "channel", "value", "notes", "dropped_batches", "ended", "end_reason")
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    T_NS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    END_REASON_FIELD_NUMBER: _ClassVar[int]
    next_sequence: int
    t_ns: _containers.RepeatedScalarFieldContainer[int]
    channel: _containers.RepeatedScalarFieldContainer[int]
    value: _containers.RepeatedScalarFieldContainer[float]
    notes: _containers.RepeatedCompositeFieldContainer[Note]
    dropped_batches: int
    ended: bool
    end_reason: str
    def __init__(self, next_sequence: _Optional[int] = ..., t_ns: _Optional[_Iterable[int]] = ..., channel: _Optional[_Iterable[int]] = ..., value: _Optional[_Iterable[float]] = ..., notes: _Optional[_Iterable[_Union[Note, _Mapping]]] = ..., dropped_batches: _Optional[int] = ..., ended: _Optional[bool] = ..., end_reason: _Optional[str] = ...) -> None: ...

class Note(_message.Message):
    __slots__ = ("t_ns", "name", "detail")
    T_NS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    t_ns: int
    name: str
    detail: str
    def __init__(self, t_ns: _Optional[int] = ..., name: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "pid", "uid", "user", "period_ms", "job", "slurm_job_id", "begin_ns", "end_ns", "sequence", "energies", "dropped_batches", "channels")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    SLURM_JOB_ID_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ENERGIES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    pid: int
    uid: int
    user: str
    period_ms: float
    job: str
    slurm_job_id: str
    begin_ns: int
    end_ns: int
    sequence: int
    energies: _containers.RepeatedCompositeFieldContainer[DeviceEnergy]
    dropped_batches: int
    channels: _containers.RepeatedCompositeFieldContainer[Channel]
    def __init__(self, session_id: _Optional[str] = ..., pid: _Optional[int] = ..., uid: _Optional[int] = ..., user: _Optional[str] = ..., period_ms: _Optional[float] = ..., job: _Optional[str] = ..., slurm_job_id: _Optional[str] = ..., begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., sequence: _Optional[int] = ..., energies: _Optional[_Iterable[_Union[DeviceEnergy, _Mapping]]] = ..., dropped_batches: _Optional[int] = ..., channels: _Optional[_Iterable[_Union[Channel, _Mapping]]] = ...) -> None: ...

class LimitRange(_message.Message):
    __slots__ = ("device", "kind", "lowest", "highest", "steps", "current", "default", "low_steps", "current_low", "default_low")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOWEST_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_FIELD_NUMBER: _ClassVar[int]
    LOW_STEPS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_LOW_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_LOW_FIELD_NUMBER: _ClassVar[int]
    device: str
    kind: LimitKind
    lowest: float
    highest: float
    steps: _containers.RepeatedScalarFieldContainer[float]
    current: float
    default: float
    low_steps: _containers.RepeatedScalarFieldContainer[float]
    current_low: float
    default_low: float
    def __init__(self, device: _Optional[str] = ..., kind: _Optional[_Union[LimitKind, str]] = ..., lowest: _Optional[float] = ..., highest: _Optional[float] = ..., steps: _Optional[_Iterable[float]] = ..., current: _Optional[float] = ..., default: _Optional[float] = ..., low_steps: _Optional[_Iterable[float]] = ..., current_low: _Optional[float] = ..., default_low: _Optional[float] = ...) -> None: ...

class SetLimitRequest(_message.Message):
    __slots__ = ("device", "kind", "value", "low", "lease_s", "lease_id")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    device: str
    kind: LimitKind
    value: float
    low: float
    lease_s: float
    lease_id: str
    def __init__(self, device: _Optional[str] = ..., kind: _Optional[_Union[LimitKind, str]] = ..., value: _Optional[float] = ..., low: _Optional[float] = ..., lease_s: _Optional[float] = ..., lease_id: _Optional[str] = ...) -> None: ...

class SetLimitResponse(_message.Message):
    __slots__ = ("lease_id", "expires_ns", "previous", "previous_low", "actual")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_NS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_LOW_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    expires_ns: int
    previous: float
    previous_low: float
    actual: float
    def __init__(self, lease_id: _Optional[str] = ..., expires_ns: _Optional[int] = ..., previous: _Optional[float] = ..., previous_low: _Optional[float] = ..., actual: _Optional[float] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("restored",)
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    restored: float
    def __init__(self, restored: _Optional[float] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ("ok", "version", "begin_ns", "sessions", "cpu_s", "memory_bytes", "notes", "kept_batches", "leases")
    OK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_BATCHES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    version: str
    begin_ns: int
    sessions: int
    cpu_s: float
    memory_bytes: int
    notes: _containers.RepeatedCompositeFieldContainer[Note]
    kept_batches: int
    leases: int
    def __init__(self, ok: _Optional[bool] = ..., version: _Optional[str] = ..., begin_ns: _Optional[int] = ..., sessions: _Optional[int] = ..., cpu_s: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., notes: _Optional[_Iterable[_Union[Note, _Mapping]]] = ..., kept_batches: _Optional[int] = ..., leases: _Optional[int] = ...) -> None: ...
