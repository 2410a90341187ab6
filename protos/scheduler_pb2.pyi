from protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]
    PAUSE_MODE_NONE: _ClassVar[PauseMode]

class CancelReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANCEL_REASON_UNSPECIFIED: _ClassVar[CancelReason]
    CANCEL_REASON_CLIENT: _ClassVar[CancelReason]
    CANCEL_REASON_STOP: _ClassVar[CancelReason]
    CANCEL_REASON_DEADLINE: _ClassVar[CancelReason]
    CANCEL_REASON_SLOW_READER: _ClassVar[CancelReason]
    CANCEL_REASON_MOVED: _ClassVar[CancelReason]
    CANCEL_REASON_REQUESTED: _ClassVar[CancelReason]

class RejectReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECT_REASON_UNSPECIFIED: _ClassVar[RejectReason]
    REJECT_REASON_INVALID: _ClassVar[RejectReason]
    REJECT_REASON_QUEUE_FULL: _ClassVar[RejectReason]
    REJECT_REASON_DUPLICATE: _ClassVar[RejectReason]
    REJECT_REASON_SUPERSEDED: _ClassVar[RejectReason]
    REJECT_REASON_DRAINING: _ClassVar[RejectReason]
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_KEEP: PauseMode
PAUSE_MODE_NONE: PauseMode
CANCEL_REASON_UNSPECIFIED: CancelReason
CANCEL_REASON_CLIENT: CancelReason
CANCEL_REASON_STOP: CancelReason
CANCEL_REASON_DEADLINE: CancelReason
CANCEL_REASON_SLOW_READER: CancelReason
CANCEL_REASON_MOVED: CancelReason
CANCEL_REASON_REQUESTED: CancelReason
REJECT_REASON_UNSPECIFIED: RejectReason
REJECT_REASON_INVALID: RejectReason
REJECT_REASON_QUEUE_FULL: RejectReason
REJECT_REASON_DUPLICATE: RejectReason
REJECT_REASON_SUPERSEDED: RejectReason
REJECT_REASON_DRAINING: RejectReason

class CountRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[KeyUse]
    def __init__(self, keys: _Optional[_Iterable[_Union[KeyUse, _Mapping]]] = ...) -> None: ...

class KeyUse(_message.Message):
    __slots__ = ("key", "requests_per_minute", "tokens_per_minute", "num_requests", "num_tokens", "requests_left", "tokens_left")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    key: str
    requests_per_minute: int
    tokens_per_minute: int
    num_requests: int
    num_tokens: int
    requests_left: float
    tokens_left: float
    def __init__(self, key: _Optional[str] = ..., requests_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., num_requests: _Optional[int] = ..., num_tokens: _Optional[int] = ..., requests_left: _Optional[float] = ..., tokens_left: _Optional[float] = ...) -> None: ...

class CountResponse(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[KeyLeft]
    def __init__(self, keys: _Optional[_Iterable[_Union[KeyLeft, _Mapping]]] = ...) -> None: ...

class KeyLeft(_message.Message):
    __slots__ = ("key", "requests_left", "tokens_left")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    key: str
    requests_left: float
    tokens_left: float
    def __init__(self, key: _Optional[str] = ..., requests_left: _Optional[float] = ..., tokens_left: _Optional[float] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("mode", "clear_cache")
    MODE_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    mode: PauseMode
    clear_cache: bool
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ..., clear_cache: _Optional[bool] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: PauseMode
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class RoutersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RoutersResponse(_message.Message):
    __slots__ = ("peer_addresses", "num_without_address")
    PEER_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    NUM_WITHOUT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    peer_addresses: _containers.RepeatedScalarFieldContainer[str]
    num_without_address: int
    def __init__(self, peer_addresses: _Optional[_Iterable[str]] = ..., num_without_address: _Optional[int] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("open", "submit", "prompt_part", "cancel", "item_part")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PART_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ITEM_PART_FIELD_NUMBER: _ClassVar[int]
    open: Open
    submit: Submit
    prompt_part: PromptPart
    cancel: CancelSequences
    item_part: ItemPart
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., prompt_part: _Optional[_Union[PromptPart, _Mapping]] = ..., cancel: _Optional[_Union[CancelSequences, _Mapping]] = ..., item_part: _Optional[_Union[ItemPart, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("protocol_version", "router_id", "watch_cache", "peer_address")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    WATCH_CACHE_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    router_id: str
    watch_cache: bool
    peer_address: str
    def __init__(self, protocol_version: _Optional[int] = ..., router_id: _Optional[str] = ..., watch_cache: _Optional[bool] = ..., peer_address: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("group", "request_id", "attempt", "num_prompt_tokens", "prompt_token_ids", "sampling", "choices", "priority", "cache_salt", "timeout", "traceparent", "tenant", "weight", "items")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    group: int
    request_id: str
    attempt: int
    num_prompt_tokens: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    choices: _containers.RepeatedCompositeFieldContainer[SequenceStart]
    priority: int
    cache_salt: str
    timeout: float
    traceparent: str
    tenant: str
    weight: float
    items: _containers.RepeatedCompositeFieldContainer[_inference_pb2.ItemSpan]
    def __init__(self, group: _Optional[int] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., choices: _Optional[_Iterable[_Union[SequenceStart, _Mapping]]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., timeout: _Optional[float] = ..., traceparent: _Optional[str] = ..., tenant: _Optional[str] = ..., weight: _Optional[float] = ..., items: _Optional[_Iterable[_Union[_inference_pb2.ItemSpan, _Mapping]]] = ...) -> None: ...

class SequenceStart(_message.Message):
    __slots__ = ("choice", "output_token_ids")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, choice: _Optional[int] = ..., output_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptPart(_message.Message):
    __slots__ = ("group", "prompt_token_ids")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    group: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ItemPart(_message.Message):
    __slots__ = ("name", "num_bytes", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    num_bytes: int
    data: bytes
    def __init__(self, name: _Optional[bytes] = ..., num_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class CancelSequences(_message.Message):
    __slots__ = ("group", "choices", "reason")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group: int
    choices: _containers.RepeatedScalarFieldContainer[int]
    reason: CancelReason
    def __init__(self, group: _Optional[int] = ..., choices: _Optional[_Iterable[int]] = ..., reason: _Optional[_Union[CancelReason, str]] = ...) -> None: ...

class SchedulerMessage(_message.Message):
    __slots__ = ("welcome", "load", "rejected", "outputs", "prompt_logprobs", "cache_events", "wanted_items")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    WANTED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    load: Load
    rejected: _containers.RepeatedCompositeFieldContainer[Rejected]
    outputs: StepOutputs
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[SequencePromptLogprobs]
    cache_events: _containers.RepeatedCompositeFieldContainer[CacheEvent]
    wanted_items: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., rejected: _Optional[_Iterable[_Union[Rejected, _Mapping]]] = ..., outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[SequencePromptLogprobs, _Mapping]]] = ..., cache_events: _Optional[_Iterable[_Union[CacheEvent, _Mapping]]] = ..., wanted_items: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CacheEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: bytes
    removed: bytes
    cleared: CacheCleared
    def __init__(self, stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., cleared: _Optional[_Union[CacheCleared, _Mapping]] = ...) -> None: ...

class CacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "replica_id", "epoch", "model", "max_num_seqs", "features", "max_logprobs")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    replica_id: str
    epoch: int
    model: _inference_pb2.ModelInfo
    max_num_seqs: int
    features: _containers.RepeatedScalarFieldContainer[str]
    max_logprobs: int
    def __init__(self, protocol_version: _Optional[int] = ..., replica_id: _Optional[str] = ..., epoch: _Optional[int] = ..., model: _Optional[_Union[_inference_pb2.ModelInfo, _Mapping]] = ..., max_num_seqs: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., max_logprobs: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_free_blocks", "num_blocks", "num_queued_tokens", "workers_ready", "draining", "last_group", "refused_priority", "refused_tenants", "last_step", "step_seconds", "step_tokens", "step_context_tokens", "paused", "num_routers")
    class RefusedTenantsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LAST_GROUP_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REFUSED_TENANTS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_queued_tokens: int
    workers_ready: bool
    draining: bool
    last_group: int
    refused_priority: int
    refused_tenants: _containers.ScalarMap[str, int]
    last_step: int
    step_seconds: float
    step_tokens: int
    step_context_tokens: int
    paused: PauseMode
    num_routers: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., workers_ready: _Optional[bool] = ..., draining: _Optional[bool] = ..., last_group: _Optional[int] = ..., refused_priority: _Optional[int] = ..., refused_tenants: _Optional[_Mapping[str, int]] = ..., last_step: _Optional[int] = ..., step_seconds: _Optional[float] = ..., step_tokens: _Optional[int] = ..., step_context_tokens: _Optional[int] = ..., paused: _Optional[_Union[PauseMode, str]] = ..., num_routers: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("group", "reason", "message")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    group: int
    reason: RejectReason
    message: str
    def __init__(self, group: _Optional[int] = ..., reason: _Optional[_Union[RejectReason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("groups", "choices", "first_tokens", "num_tokens", "token_ids", "logprobs", "finishes")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedScalarFieldContainer[int]
    first_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    finishes: _containers.RepeatedCompositeFieldContainer[SequenceFinish]
    def __init__(self, groups: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[int]] = ..., first_tokens: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., finishes: _Optional[_Iterable[_Union[SequenceFinish, _Mapping]]] = ...) -> None: ...

class SequenceFinish(_message.Message):
    __slots__ = ("group", "choice", "reason", "stop_token_id", "num_cached_tokens", "message", "cancel_reason", "superseded", "no_token", "num_draft_tokens", "num_accepted_tokens")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_REASON_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    NO_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    group: int
    choice: int
    reason: _inference_pb2.FinishReason
    stop_token_id: int
    num_cached_tokens: int
    message: str
    cancel_reason: CancelReason
    superseded: bool
    no_token: bool
    num_draft_tokens: int
    num_accepted_tokens: int
    def __init__(self, group: _Optional[int] = ..., choice: _Optional[int] = ..., reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., message: _Optional[str] = ..., cancel_reason: _Optional[_Union[CancelReason, str]] = ..., superseded: _Optional[bool] = ..., no_token: _Optional[bool] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ...) -> None: ...

class SequencePromptLogprobs(_message.Message):
    __slots__ = ("group", "choice", "frame")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    group: int
    choice: int
    frame: _inference_pb2.PromptLogprobs
    def __init__(self, group: _Optional[int] = ..., choice: _Optional[int] = ..., frame: _Optional[_Union[_inference_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...
