from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("timelines", "unreachable")
    TIMELINES_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    timelines: _containers.RepeatedCompositeFieldContainer[RequestTimeline]
    unreachable: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, timelines: _Optional[_Iterable[_Union[RequestTimeline, _Mapping]]] = ..., unreachable: _Optional[_Iterable[str]] = ...) -> None: ...

class RequestTimeline(_message.Message):
    __slots__ = ("request_id", "replica_id", "entries", "num_dropped", "finished", "now", "num_draft_tokens", "num_accepted_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    replica_id: str
    entries: _containers.RepeatedCompositeFieldContainer[TimelineEntry]
    num_dropped: int
    finished: bool
    now: float
    num_draft_tokens: int
    num_accepted_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., replica_id: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[TimelineEntry, _Mapping]]] = ..., num_dropped: _Optional[int] = ..., finished: _Optional[bool] = ..., now: _Optional[float] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ...) -> None: ...

class TimelineEntry(_message.Message):
    __slots__ = ("moment", "time", "choice", "step", "num_tokens", "reason")
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    moment: str
    time: float
    choice: int
    step: int
    num_tokens: int
    reason: str
    def __init__(self, moment: _Optional[str] = ..., time: _Optional[float] = ..., choice: _Optional[int] = ..., step: _Optional[int] = ..., num_tokens: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("num_blocks", "unreachable")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    unreachable: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_blocks: _Optional[int] = ..., unreachable: _Optional[_Iterable[str]] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("request_id", "replica")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    replica: str
    def __init__(self, request_id: _Optional[str] = ..., replica: _Optional[str] = ...) -> None: ...

class MigrateResponse(_message.Message):
    __slots__ = ("moved_from", "moved_to", "num_output_tokens")
    MOVED_FROM_FIELD_NUMBER: _ClassVar[int]
    MOVED_TO_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    moved_from: str
    moved_to: str
    num_output_tokens: int
    def __init__(self, moved_from: _Optional[str] = ..., moved_to: _Optional[str] = ..., num_output_tokens: _Optional[int] = ...) -> None: ...
