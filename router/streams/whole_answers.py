"""Answers that come whole: what they may hold until they are sent, and how many logprobs one may have.

An answer is kept as bytes while it grows. Callers share the room for them (runtime.shares), which is charged as they
grow: small answers are not counted, and one that finds no room ends with RESOURCE_EXHAUSTED.
"""

from collections.abc import Iterable

from configs.sampling import ALL_LOGPROBS
from protos.inference_pb2 import SamplingParams
from router.errors import InvalidRequest, RouterFull
from router.security.identity import caller_share
from runtime.shares import SharedRoom

# An answer takes room in such steps, so one below the first step takes none.
_STEP_BYTES = 64 * 1024
# What a logprob takes in an answer: as JSON (26 bytes in a completion, 80 in a chat), and in a gRPC message.
_JSON_BYTES, _MESSAGE_BYTES = 64, 20
_RETRY_S = 1.0
_INSTEAD = "ask for a stream (stream=true, or the call Generate), or for fewer of n, max_tokens and logprobs"


class WholeAnswers:
    """The room of a router process for answers that come whole."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: option max_answers_bytes."""
        self.shared = SharedRoom(max_bytes)

    def begin(
        self,
        sampling: Iterable[SamplingParams],
        max_model_len: int,
        max_bytes: int | None = None,
        *,
        is_message: bool = False,
    ) -> "AnswerRoom":
        """Returns the room of an answer of the caller, which takes none of it yet.

        sampling: of its prompts, as requested. max_model_len: 0: not known. max_bytes: None: as there is room.
        is_message: of gRPC, not JSON. Raises InvalidRequest for an answer that may be too large for any room.
        """
        # A caller that is alone gets half of all.
        most = min(self.shared.size // 2, max_bytes or self.shared.size)
        each = _MESSAGE_BYTES if is_message else _JSON_BYTES
        asked = list(sampling)
        counts = [_num_logprobs(params, max_model_len) for params in asked]
        if sum(counts) * each > most:
            params = asked[counts.index(max(counts))]
            prompts = f" of each of {len(asked)} prompts" if len(asked) > 1 else ""
            raise InvalidRequest(
                f"sampling.n={max(params.n, 1)} with max_tokens={params.max_tokens} and logprobs="
                f"{_num_top(params)}{prompts} are up to {sum(counts)} logprobs in one answer: at most "
                f"{most // each} come whole; {_INSTEAD}"
            )
        return AnswerRoom(self.shared, caller_share(), most)


class AnswerRoom:
    """The room that one answer takes."""

    def __init__(self, shared: SharedRoom, caller: str, max_bytes: int) -> None:
        self._shared, self._caller, self._max_bytes = shared, caller, max_bytes
        # Bytes of the answer, and those taken for them.
        self.size = self._taken = 0

    def grow(self, num_bytes: int) -> None:
        """Adds bytes. Raises RouterFull if there is no room for them now, InvalidRequest if there never is."""
        self.size += num_bytes
        if self.size - self._taken < _STEP_BYTES:
            return
        if self.size > self._max_bytes:
            raise InvalidRequest(
                f"the answer has more than {self._max_bytes} bytes, the most that come whole; {_INSTEAD}"
            )
        shared, more = self._shared, self.size - self._taken
        if not shared.take(self._caller, more):
            error = RouterFull(
                f"this router holds {shared.total} bytes of answers that come whole, {shared.of(self._caller)} of them "
                f"for this caller, {self.size} in this one. A caller may have as many as are free of "
                f"max_answers_bytes={shared.size}: try again later or at another router, or {_INSTEAD}"
            )
            error.retry_after_s = _RETRY_S
            raise error
        self._taken = self.size

    def settle(self, num_bytes: int) -> None:
        """Sets how many bytes the answer has in the end. Raises as `grow` does."""
        if num_bytes < self.size:
            self.shrink(self.size - num_bytes)
        else:
            self.grow(num_bytes - self.size)

    def shrink(self, num_bytes: int) -> None:
        """Takes off bytes that have been sent."""
        self.size -= num_bytes
        if self._taken - self.size >= _STEP_BYTES:
            self._shared.give_back(self._caller, self._taken - max(self.size, 0))
            self._taken = max(self.size, 0)

    def close(self) -> None:
        """Gives back the rest. Later calls change nothing."""
        taken, self._taken = self._taken, 0
        if taken:
            self._shared.give_back(self._caller, taken)


def _num_top(params: SamplingParams) -> int:
    """Logprobs beside each token's own. Those of all tokens count as they come."""
    return len(params.logprob_token_ids) or params.logprobs % ALL_LOGPROBS


def _num_logprobs(params: SamplingParams, max_model_len: int) -> int:
    """The most logprobs of output tokens that a prompt's answer may have. With an open max_tokens they count as they
    come."""
    if not (params.HasField("logprobs") or params.logprob_token_ids):
        return 0
    # What is more is refused for its own reason.
    most = min(params.max_tokens, max_model_len or params.max_tokens)
    return max(params.n, 1) * most * (1 + _num_top(params))
