"""The results of the clients: whole generations, and the events of a stream."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from octavo.client.requests import SamplingParams
from octavo.client.tools import ToolCall, ToolCallPiece
from protos import inference_pb2 as pb


class FinishReason(StrEnum):
    """Why a choice ended."""

    # EOS, a stop token or a stop string.
    STOP = "stop"
    # max_tokens or max_model_len.
    LENGTH = "length"
    # The output repeats itself: repetition_detection.
    REPETITION = "repetition"
    CANCELLED = "cancelled"
    ERROR = "error"


FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_REPETITION: FinishReason.REPETITION,
    pb.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    pb.FINISH_REASON_ERROR: FinishReason.ERROR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A candidate token. logprob: natural log; rank: 1 is the likeliest; token: bytes, maybe part of a character."""

    token_id: int
    logprob: float
    rank: int
    token: bytes

    @classmethod
    def from_proto(cls, message: pb.TokenLogprob) -> "Logprob":
        return cls(token_id=message.token_id, logprob=message.logprob, rank=message.rank, token=message.token)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """The token at one position, and the most likely ones there, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...]

    @classmethod
    def from_proto(cls, message: pb.TokenLogprobs) -> "PositionLogprobs":
        return cls(chosen=Logprob.from_proto(message.chosen), top=tuple(map(Logprob.from_proto, message.top)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts. cached_tokens: prompt tokens found in the prefix cache; completion_tokens: over all choices;
    reasoning_tokens: those of them that are reasoning, if the output is parsed; draft_tokens: verified drafts of
    speculation, and accepted_draft_tokens those of them that were right."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One output. finish_reason: None while it runs. stop: the stop string or token id that ended it; None for EOS."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop: str | int | None
    # False if it was resumed on a replica of other numerics, so its tokens may differ from an uninterrupted run.
    exact: bool
    # The text, told apart, if the output was parsed.
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message of a parsed output, to go on with."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The result of a request. num_resumes: how often the client resumed after a lost connection."""

    request_id: str
    model: str
    seed: int
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    # For prompt positions from 1, if requested.
    prompt_logprobs: tuple[PositionLogprobs, ...]
    # None until the stream has finished.
    usage: Usage | None
    fingerprint: str
    num_resumes: int

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def finished(self) -> bool:
        """True if it grows no more."""
        return self.usage is not None or any(each.finish_reason is FinishReason.CANCELLED for each in self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request was admitted. Comes once, before any other event."""

    request_id: str
    model: str
    seed: int
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Logprobs of the next prompt positions; first_position is the position of logprobs[0]."""

    first_position: int
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The next piece of one choice. text may lag behind token_ids: it holds only complete, final characters.

    finish_reason and stop are set on the last piece of the choice.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop: str | int | None
    # The same text, told apart, if the output is parsed.
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Every choice has finished. The last event."""

    usage: Usage


StreamEvent = Started | PromptScored | Delta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    token_ids: tuple[int, ...]
    max_model_len: int

    @classmethod
    def from_proto(cls, message: pb.TokenizeResponse) -> "Tokenized":
        return cls(token_ids=tuple(message.token_ids), max_model_len=message.max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model; see `ModelInfo` in protos/inference.proto."""

    name: str
    architecture: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: str
    default_sampling: SamplingParams
    block_size: int
    num_blocks: int
    octavo_version: str

    @classmethod
    def from_proto(cls, message: pb.ModelInfo) -> "ModelInfo":
        return cls(
            name=message.name,
            architecture=message.architecture,
            fingerprint=message.fingerprint,
            max_model_len=message.max_model_len,
            vocab_size=message.vocab_size,
            eos_token_ids=tuple(message.eos_token_ids),
            dtype=message.dtype,
            quantization=message.quantization,
            default_sampling=SamplingParams.from_proto(message.default_sampling),
            block_size=message.block_size,
            num_blocks=message.num_blocks,
            octavo_version=message.octavo_version,
        )
