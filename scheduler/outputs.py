"""What goes to one router: the columns of a step, split into messages of at most 1 MiB."""

from collections.abc import Sequence

from protos import inference_pb2, scheduler_pb2
from runtime.wire import SESSION_MESSAGE_BYTES
from scheduler.messages import FinishReason

# Upper bounds in bytes of what an entry takes: varints, of which the group's may have ten bytes, tags and lengths.
_SEQUENCE_BYTES, _TOKEN_BYTES, _ENTRY_BYTES, _FINISH_BYTES = 32, 5, 16, 64
# Left for Welcome, Load and the messages' own frames.
_LIMIT_BYTES = SESSION_MESSAGE_BYTES - 16 * 1024
# Of an error's or a rejection's text.
_MAX_TEXT = 1024

_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: inference_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: inference_pb2.FINISH_REASON_ERROR,
}


class Outbox:
    """Collects for one router until `take`. Entries leave in the order in which they came."""

    def __init__(self) -> None:
        self._full: list[scheduler_pb2.SchedulerMessage] = []
        self._begin()

    def _begin(self) -> None:
        self._size = 0
        self._message = scheduler_pb2.SchedulerMessage()
        self._groups: list[int] = []
        self._choices: list[int] = []
        self._first_tokens: list[int] = []
        self._num_tokens: list[int] = []
        self._token_ids: list[int] = []

    def add_tokens(
        self, group: int, choice: int, first_token: int, token_ids: Sequence[int], logprobs: Sequence[object]
    ) -> None:
        """logprobs: one inference_pb2.TokenLogprobs a token, or none at all."""
        size = _SEQUENCE_BYTES + _TOKEN_BYTES * len(token_ids)
        for entry in logprobs:
            assert isinstance(entry, inference_pb2.TokenLogprobs)
            size += _ENTRY_BYTES + entry.ByteSize()
        self._make_room(size)
        self._groups.append(group)
        self._choices.append(choice)
        self._first_tokens.append(first_token)
        self._num_tokens.append(len(token_ids))
        self._token_ids += token_ids
        if logprobs:
            self._message.outputs.logprobs.extend(logprobs)  # type: ignore[arg-type]  # asserted above

    def add_finish(
        self,
        group: int,
        choice: int,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        num_cached_tokens: int = 0,
        message: str = "",
        cancel_reason: scheduler_pb2.CancelReason = scheduler_pb2.CANCEL_REASON_UNSPECIFIED,
        superseded: bool = False,
    ) -> None:
        text = message[:_MAX_TEXT]
        self._make_room(_FINISH_BYTES + 4 * len(text))
        self._message.outputs.finishes.add(
            group=group,
            choice=choice,
            reason=_REASONS[reason],
            stop_token_id=stop_token_id,
            num_cached_tokens=num_cached_tokens,
            message=text,
            cancel_reason=cancel_reason,
            superseded=superseded,
        )

    def add_prompt_logprobs(self, group: int, choice: int, frame: inference_pb2.PromptLogprobs) -> None:
        self._make_room(_SEQUENCE_BYTES + frame.ByteSize())
        self._message.prompt_logprobs.add(group=group, choice=choice, frame=frame)

    def add_rejected(self, group: int, reason: scheduler_pb2.RejectReason, message: str) -> None:
        text = message[:_MAX_TEXT]
        self._make_room(_ENTRY_BYTES + 4 * len(text))
        self._message.rejected.add(group=group, reason=reason, message=text)

    def take(self, load: scheduler_pb2.Load | None = None, welcome: scheduler_pb2.Welcome | None = None) -> list[bytes]:
        """Serialized SchedulerMessages with all that was added, the first one with `welcome` and `load`; none if there
        is nothing to say."""
        if not self._full and not self._size and load is None and welcome is None:
            return []
        if self._size or not self._full:
            self._seal()
        messages, self._full = self._full, []
        if welcome is not None:
            messages[0].welcome.CopyFrom(welcome)
        if load is not None:
            messages[0].load.CopyFrom(load)
        return [message.SerializeToString() for message in messages]

    def _make_room(self, size: int) -> None:
        if self._size and self._size + size > _LIMIT_BYTES:
            self._seal()
        self._size += size

    def _seal(self) -> None:
        if self._groups:
            outputs = self._message.outputs
            outputs.groups.extend(self._groups)
            outputs.choices.extend(self._choices)
            outputs.first_tokens.extend(self._first_tokens)
            outputs.num_tokens.extend(self._num_tokens)
            outputs.token_ids.extend(self._token_ids)
        self._full.append(self._message)
        self._begin()
