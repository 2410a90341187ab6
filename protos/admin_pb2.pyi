from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HoldState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOLD_STATE_NONE: _ClassVar[HoldState]
    HOLD_STATE_PAUSED: _ClassVar[HoldState]
    HOLD_STATE_DRAINED: _ClassVar[HoldState]
HOLD_STATE_NONE: HoldState
HOLD_STATE_PAUSED: HoldState
HOLD_STATE_DRAINED: HoldState

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

class ObserveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ObserveResponse(_message.Message):
    __slots__ = ("replicas", "router", "requests", "num_requests")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaView]
    router: RouterView
    requests: _containers.RepeatedCompositeFieldContainer[RequestView]
    num_requests: int
    def __init__(self, replicas: _Optional[_Iterable[_Union[ReplicaView, _Mapping]]] = ..., router: _Optional[_Union[RouterView, _Mapping]] = ..., requests: _Optional[_Iterable[_Union[RequestView, _Mapping]]] = ..., num_requests: _Optional[int] = ...) -> None: ...

class ReplicaView(_message.Message):
    __slots__ = ("address", "replica_id", "state", "description", "is_observed", "epoch", "num_running", "num_waiting", "num_queued_tokens", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "num_available_blocks", "num_cached_blocks", "block_size", "used_blocks", "cached_blocks", "totals", "ranks", "steps", "sequences")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    IS_OBSERVED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_AVAILABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    address: str
    replica_id: str
    state: str
    description: str
    is_observed: bool
    epoch: int
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    num_available_blocks: int
    num_cached_blocks: int
    block_size: int
    used_blocks: bytes
    cached_blocks: bytes
    totals: ReplicaTotals
    ranks: _containers.RepeatedCompositeFieldContainer[RankView]
    steps: _containers.RepeatedCompositeFieldContainer[StepView]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceView]
    def __init__(self, address: _Optional[str] = ..., replica_id: _Optional[str] = ..., state: _Optional[str] = ..., description: _Optional[str] = ..., is_observed: _Optional[bool] = ..., epoch: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_available_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., used_blocks: _Optional[bytes] = ..., cached_blocks: _Optional[bytes] = ..., totals: _Optional[_Union[ReplicaTotals, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankView, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[StepView, _Mapping]]] = ..., sequences: _Optional[_Iterable[_Union[SequenceView, _Mapping]]] = ...) -> None: ...

class ReplicaTotals(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_output_tokens", "num_preemptions", "num_prefix_queries", "num_prefix_hits", "num_speculated_tokens", "num_accepted_tokens", "num_steps", "step_seconds", "lag")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_speculated_tokens: int
    num_accepted_tokens: int
    num_steps: int
    step_seconds: HistogramView
    lag: HistogramView
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_prefix_queries: _Optional[int] = ..., num_prefix_hits: _Optional[int] = ..., num_speculated_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_steps: _Optional[int] = ..., step_seconds: _Optional[_Union[HistogramView, _Mapping]] = ..., lag: _Optional[_Union[HistogramView, _Mapping]] = ...) -> None: ...

class HistogramView(_message.Message):
    __slots__ = ("bounds", "counts")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class RankView(_message.Message):
    __slots__ = ("rank", "pid", "state", "step", "silence")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SILENCE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    state: str
    step: int
    silence: float
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., step: _Optional[int] = ..., silence: _Optional[float] = ...) -> None: ...

class StepView(_message.Message):
    __slots__ = ("step", "num_decode_tokens", "num_draft_tokens", "num_prefill_tokens", "seconds", "age")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    step: int
    num_decode_tokens: int
    num_draft_tokens: int
    num_prefill_tokens: int
    seconds: float
    age: float
    def __init__(self, step: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., age: _Optional[float] = ...) -> None: ...

class SequenceView(_message.Message):
    __slots__ = ("request_id", "choice", "status", "num_prompt_tokens", "num_output_tokens", "num_computed_tokens", "num_blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    status: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., status: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class RouterView(_message.Message):
    __slots__ = ("router_id", "version", "model", "uptime", "num_streams", "num_parked_streams", "num_prompt_tokens", "num_output_tokens", "num_resubmissions", "time_to_first_token", "inter_token_latency", "lag")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARKED_STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_LATENCY_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    version: str
    model: str
    uptime: float
    num_streams: int
    num_parked_streams: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_resubmissions: int
    time_to_first_token: HistogramView
    inter_token_latency: HistogramView
    lag: HistogramView
    def __init__(self, router_id: _Optional[str] = ..., version: _Optional[str] = ..., model: _Optional[str] = ..., uptime: _Optional[float] = ..., num_streams: _Optional[int] = ..., num_parked_streams: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_resubmissions: _Optional[int] = ..., time_to_first_token: _Optional[_Union[HistogramView, _Mapping]] = ..., inter_token_latency: _Optional[_Union[HistogramView, _Mapping]] = ..., lag: _Optional[_Union[HistogramView, _Mapping]] = ...) -> None: ...

class RequestView(_message.Message):
    __slots__ = ("request_id", "replica_id", "num_prompt_tokens", "num_output_tokens", "max_tokens", "age", "time_to_first_token", "num_resubmissions", "is_parked")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    IS_PARKED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    replica_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    age: float
    time_to_first_token: float
    num_resubmissions: int
    is_parked: bool
    def __init__(self, request_id: _Optional[str] = ..., replica_id: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., age: _Optional[float] = ..., time_to_first_token: _Optional[float] = ..., num_resubmissions: _Optional[int] = ..., is_parked: _Optional[bool] = ...) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("replica", "state")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    replica: str
    state: HoldState
    def __init__(self, replica: _Optional[str] = ..., state: _Optional[_Union[HoldState, str]] = ...) -> None: ...

class HoldResponse(_message.Message):
    __slots__ = ("before", "num_streams")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    before: HoldState
    num_streams: int
    def __init__(self, before: _Optional[_Union[HoldState, str]] = ..., num_streams: _Optional[int] = ...) -> None: ...
