from protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_LOADING: _ClassVar[WorkerState]
    WORKER_STATE_COMPILING: _ClassVar[WorkerState]
    WORKER_STATE_IDLE: _ClassVar[WorkerState]
    WORKER_STATE_STEPPING: _ClassVar[WorkerState]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_LOADING: WorkerState
WORKER_STATE_COMPILING: WorkerState
WORKER_STATE_IDLE: WorkerState
WORKER_STATE_STEPPING: WorkerState

class SchedulerToWorker(_message.Message):
    __slots__ = ("reset", "plan", "shutdown", "probe", "item", "leave")
    RESET_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    reset: Reset
    plan: StepPlan
    shutdown: Shutdown
    probe: Probe
    item: ItemToEncode
    leave: Leave
    def __init__(self, reset: _Optional[_Union[Reset, _Mapping]] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., item: _Optional[_Union[ItemToEncode, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ...) -> None: ...

class WorkerToScheduler(_message.Message):
    __slots__ = ("hello", "ready", "result", "failure", "item")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ready: Ready
    result: StepResult
    failure: Failure
    item: ItemPrepared
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., item: _Optional[_Union[ItemPrepared, _Mapping]] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leave(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class ItemToEncode(_message.Message):
    __slots__ = ("epoch", "number", "data", "num_embeddings")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    NUM_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    data: bytes
    num_embeddings: int
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., data: _Optional[bytes] = ..., num_embeddings: _Optional[int] = ...) -> None: ...

class ItemPrepared(_message.Message):
    __slots__ = ("epoch", "rank", "number", "error")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    number: int
    error: str
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., number: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "octavo_version", "rank", "world_size", "model", "block_size", "max_num_seqs", "max_num_batched_tokens", "pid", "instance", "store_address", "max_logprobs")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    OCTAVO_VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    octavo_version: str
    rank: int
    world_size: int
    model: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pid: int
    instance: int
    store_address: str
    max_logprobs: int
    def __init__(self, protocol_version: _Optional[int] = ..., octavo_version: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., model: _Optional[str] = ..., block_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., pid: _Optional[int] = ..., instance: _Optional[int] = ..., store_address: _Optional[str] = ..., max_logprobs: _Optional[int] = ...) -> None: ...

class Reset(_message.Message):
    __slots__ = ("epoch", "rendezvous", "scheduler")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rendezvous: str
    scheduler: int
    def __init__(self, epoch: _Optional[int] = ..., rendezvous: _Optional[str] = ..., scheduler: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("epoch", "rank", "model", "num_swap_blocks", "features", "holds_constrained", "drafter", "encoder_cache_size")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    HOLDS_CONSTRAINED_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    ENCODER_CACHE_SIZE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    model: _inference_pb2.ModelInfo
    num_swap_blocks: int
    features: _containers.RepeatedScalarFieldContainer[str]
    holds_constrained: bool
    drafter: str
    encoder_cache_size: int
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., model: _Optional[_Union[_inference_pb2.ModelInfo, _Mapping]] = ..., num_swap_blocks: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., holds_constrained: _Optional[bool] = ..., drafter: _Optional[str] = ..., encoder_cache_size: _Optional[int] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("epoch", "step", "previous_digest", "freed_rows", "new_rows", "grown_rows", "num_new_blocks", "new_blocks", "decode_rows", "rows_with_drafts", "num_drafts", "draft_token_ids", "rows", "num_tokens", "swap_out_blocks", "swap_out_host_blocks", "swap_in_host_blocks", "swap_in_blocks", "trimmed_rows", "num_kept_blocks", "drafting_rows", "num_wanted_drafts", "dropped_items", "forgotten_items", "encoded_items")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FREED_ROWS_FIELD_NUMBER: _ClassVar[int]
    NEW_ROWS_FIELD_NUMBER: _ClassVar[int]
    GROWN_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_WITH_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_WANTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_ITEMS_FIELD_NUMBER: _ClassVar[int]
    ENCODED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    previous_digest: bytes
    freed_rows: _containers.RepeatedScalarFieldContainer[int]
    new_rows: _containers.RepeatedCompositeFieldContainer[NewRow]
    grown_rows: _containers.RepeatedScalarFieldContainer[int]
    num_new_blocks: _containers.RepeatedScalarFieldContainer[int]
    new_blocks: _containers.RepeatedScalarFieldContainer[int]
    decode_rows: bytes
    rows_with_drafts: bytes
    num_drafts: bytes
    draft_token_ids: bytes
    rows: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    swap_out_blocks: _containers.RepeatedScalarFieldContainer[int]
    swap_out_host_blocks: _containers.RepeatedScalarFieldContainer[int]
    swap_in_host_blocks: _containers.RepeatedScalarFieldContainer[int]
    swap_in_blocks: _containers.RepeatedScalarFieldContainer[int]
    trimmed_rows: _containers.RepeatedScalarFieldContainer[int]
    num_kept_blocks: _containers.RepeatedScalarFieldContainer[int]
    drafting_rows: _containers.RepeatedScalarFieldContainer[int]
    num_wanted_drafts: _containers.RepeatedScalarFieldContainer[int]
    dropped_items: _containers.RepeatedScalarFieldContainer[int]
    forgotten_items: _containers.RepeatedScalarFieldContainer[int]
    encoded_items: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., previous_digest: _Optional[bytes] = ..., freed_rows: _Optional[_Iterable[int]] = ..., new_rows: _Optional[_Iterable[_Union[NewRow, _Mapping]]] = ..., grown_rows: _Optional[_Iterable[int]] = ..., num_new_blocks: _Optional[_Iterable[int]] = ..., new_blocks: _Optional[_Iterable[int]] = ..., decode_rows: _Optional[bytes] = ..., rows_with_drafts: _Optional[bytes] = ..., num_drafts: _Optional[bytes] = ..., draft_token_ids: _Optional[bytes] = ..., rows: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., swap_out_blocks: _Optional[_Iterable[int]] = ..., swap_out_host_blocks: _Optional[_Iterable[int]] = ..., swap_in_host_blocks: _Optional[_Iterable[int]] = ..., swap_in_blocks: _Optional[_Iterable[int]] = ..., trimmed_rows: _Optional[_Iterable[int]] = ..., num_kept_blocks: _Optional[_Iterable[int]] = ..., drafting_rows: _Optional[_Iterable[int]] = ..., num_wanted_drafts: _Optional[_Iterable[int]] = ..., dropped_items: _Optional[_Iterable[int]] = ..., forgotten_items: _Optional[_Iterable[int]] = ..., encoded_items: _Optional[_Iterable[int]] = ...) -> None: ...

class NewRow(_message.Message):
    __slots__ = ("row", "sequence", "token_ids", "num_prompt_tokens", "num_computed_tokens", "block_ids", "sampling", "choice", "items")
    ROW_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    row: int
    sequence: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.SamplingParams
    choice: int
    items: _containers.RepeatedCompositeFieldContainer[RowItem]
    def __init__(self, row: _Optional[int] = ..., sequence: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., choice: _Optional[int] = ..., items: _Optional[_Iterable[_Union[RowItem, _Mapping]]] = ...) -> None: ...

class RowItem(_message.Message):
    __slots__ = ("number", "first_token", "num_tokens", "grid", "time_step")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    TIME_STEP_FIELD_NUMBER: _ClassVar[int]
    number: int
    first_token: int
    num_tokens: int
    grid: _containers.RepeatedScalarFieldContainer[int]
    time_step: float
    def __init__(self, number: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., grid: _Optional[_Iterable[int]] = ..., time_step: _Optional[float] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("epoch", "step", "sequences", "positions", "num_tokens", "token_ids", "logprobs", "prompt_logprobs", "timing", "failed_sequences", "failure_messages", "drafts", "num_tokens_of_all")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    FAILED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_OF_ALL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    sequences: bytes
    positions: bytes
    num_tokens: bytes
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RowPromptLogprobs]
    timing: StepTiming
    failed_sequences: _containers.RepeatedScalarFieldContainer[int]
    failure_messages: _containers.RepeatedScalarFieldContainer[str]
    drafts: _containers.RepeatedCompositeFieldContainer[SequenceDrafts]
    num_tokens_of_all: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., sequences: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RowPromptLogprobs, _Mapping]]] = ..., timing: _Optional[_Union[StepTiming, _Mapping]] = ..., failed_sequences: _Optional[_Iterable[int]] = ..., failure_messages: _Optional[_Iterable[str]] = ..., drafts: _Optional[_Iterable[_Union[SequenceDrafts, _Mapping]]] = ..., num_tokens_of_all: _Optional[int] = ...) -> None: ...

class SequenceDrafts(_message.Message):
    __slots__ = ("sequence", "token_ids")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RowPromptLogprobs(_message.Message):
    __slots__ = ("sequence", "frame")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    frame: _inference_pb2.PromptLogprobs
    def __init__(self, sequence: _Optional[int] = ..., frame: _Optional[_Union[_inference_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class StepTiming(_message.Message):
    __slots__ = ("total", "forward", "sample", "draft")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    total: float
    forward: float
    sample: float
    draft: float
    def __init__(self, total: _Optional[float] = ..., forward: _Optional[float] = ..., sample: _Optional[float] = ..., draft: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("rank", "epoch", "state", "step", "instance", "progress")
    RANK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    epoch: int
    state: WorkerState
    step: int
    instance: int
    progress: float
    def __init__(self, rank: _Optional[int] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., step: _Optional[int] = ..., instance: _Optional[int] = ..., progress: _Optional[float] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("epoch", "rank", "message", "permanent", "is_consequence")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PERMANENT_FIELD_NUMBER: _ClassVar[int]
    IS_CONSEQUENCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    message: str
    permanent: bool
    is_consequence: bool
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., message: _Optional[str] = ..., permanent: _Optional[bool] = ..., is_consequence: _Optional[bool] = ...) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ("reason", "permanent")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PERMANENT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    permanent: bool
    def __init__(self, reason: _Optional[str] = ..., permanent: _Optional[bool] = ...) -> None: ...
