from protos import admin_pb2 as _admin_pb2
from protos import inference_pb2 as _inference_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FindRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class FindResponse(_message.Message):
    __slots__ = ("is_live", "held_over", "waiting", "attempt")
    IS_LIVE_FIELD_NUMBER: _ClassVar[int]
    HELD_OVER_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    is_live: bool
    held_over: str
    waiting: _admin_pb2.RequestTimeline
    attempt: int
    def __init__(self, is_live: _Optional[bool] = ..., held_over: _Optional[str] = ..., waiting: _Optional[_Union[_admin_pb2.RequestTimeline, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class ReadEventsRequest(_message.Message):
    __slots__ = ("request_id", "position")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    position: int
    def __init__(self, request_id: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class StreamEvent(_message.Message):
    __slots__ = ("id", "event", "data")
    ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    id: str
    event: str
    data: str
    def __init__(self, id: _Optional[str] = ..., event: _Optional[str] = ..., data: _Optional[str] = ...) -> None: ...
