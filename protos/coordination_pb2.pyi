from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaCondition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_CONDITION_UNSPECIFIED: _ClassVar[ReplicaCondition]
    REPLICA_CONDITION_INCOMPLETE: _ClassVar[ReplicaCondition]
    REPLICA_CONDITION_COMPLETE: _ClassVar[ReplicaCondition]
    REPLICA_CONDITION_MEETING: _ClassVar[ReplicaCondition]
    REPLICA_CONDITION_READY: _ClassVar[ReplicaCondition]
REPLICA_CONDITION_UNSPECIFIED: ReplicaCondition
REPLICA_CONDITION_INCOMPLETE: ReplicaCondition
REPLICA_CONDITION_COMPLETE: ReplicaCondition
REPLICA_CONDITION_MEETING: ReplicaCondition
REPLICA_CONDITION_READY: ReplicaCondition

class ReplicaState(_message.Message):
    __slots__ = ("protocol_version", "octavo_version", "replica", "instance", "options", "fingerprint", "epoch", "condition", "cause", "description", "step", "wanted_step", "store_address")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    OCTAVO_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WANTED_STEP_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    octavo_version: str
    replica: int
    instance: int
    options: _containers.ScalarMap[str, int]
    fingerprint: str
    epoch: int
    condition: ReplicaCondition
    cause: str
    description: str
    step: int
    wanted_step: int
    store_address: str
    def __init__(self, protocol_version: _Optional[int] = ..., octavo_version: _Optional[str] = ..., replica: _Optional[int] = ..., instance: _Optional[int] = ..., options: _Optional[_Mapping[str, int]] = ..., fingerprint: _Optional[str] = ..., epoch: _Optional[int] = ..., condition: _Optional[_Union[ReplicaCondition, str]] = ..., cause: _Optional[str] = ..., description: _Optional[str] = ..., step: _Optional[int] = ..., wanted_step: _Optional[int] = ..., store_address: _Optional[str] = ...) -> None: ...

class GroupState(_message.Message):
    __slots__ = ("instance", "epoch", "is_open", "rendezvous", "cause", "wave_step", "waiting_for", "refusal")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    WAVE_STEP_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    instance: int
    epoch: int
    is_open: bool
    rendezvous: str
    cause: str
    wave_step: int
    waiting_for: str
    refusal: str
    def __init__(self, instance: _Optional[int] = ..., epoch: _Optional[int] = ..., is_open: _Optional[bool] = ..., rendezvous: _Optional[str] = ..., cause: _Optional[str] = ..., wave_step: _Optional[int] = ..., waiting_for: _Optional[str] = ..., refusal: _Optional[str] = ...) -> None: ...
