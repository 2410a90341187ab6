"""The client's state of one request: a pure state machine that both clients drive.

It assembles the messages of any number of calls, to any routers, into one output. Its state is always enough to
continue at another router: `next_call` puts it into a Resume.
"""

from collections.abc import Iterator

from octavo.client.errors import ProtocolError
from octavo.client.results import (
    FINISH_REASONS,
    Choice,
    Delta,
    Finished,
    FinishReason,
    Generation,
    PositionLogprobs,
    PromptScored,
    Started,
    StreamEvent,
    Usage,
)
from octavo.client.tools import ToolCall, ToolCallPiece
from protos import inference_pb2 as pb


class _CallState:
    def __init__(self, piece: ToolCallPiece) -> None:
        self.id, self.name = piece.id, piece.name
        self.arguments: list[str] = []


class _ChoiceState:
    """The output of one choice so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.contents: list[str] = []
        self.reasonings: list[str] = []
        self.calls: list[_CallState] = []
        self.logprobs: list[PositionLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop: str | int | None = None
        self.exact = True
        # Bytes of text before the request, which resumes.
        self.num_bytes_before = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add_call(self, piece: ToolCallPiece) -> None:
        """Raises ProtocolError."""
        if piece.name:
            self.calls.append(_CallState(piece))
        if piece.index != len(self.calls) - 1:
            raise ProtocolError(f"a piece of tool call {piece.index}, but {len(self.calls)} have begun")
        self.calls[-1].arguments.append(piece.arguments)


class Assembly:
    """One request, from its first call to its last message."""

    def __init__(self, request: pb.GenerateRequest):
        self._request = request
        self._started: pb.Started | None = None
        self._attempt = request.resume.attempt
        self._num_resumes = 0
        self.num_calls = 0
        # A request without its prompt and items, from which resumes are made; None until there is one.
        self._bare: pb.GenerateRequest | None = None
        # The next resume has the items; the last one had them.
        self._brings_items = self._has_brought_items = False
        # True if the last call has said Started.
        self.is_answered = False
        self._choices: dict[int, _ChoiceState] = {}
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._usage: Usage | None = None
        for each in request.resume.choices:
            state = self._choices[each.index] = _ChoiceState()
            state.token_ids.extend(each.output_token_ids)
            state.num_bytes_before = each.text_bytes_delivered
            # Why it ended, its client knows.
            state.finish_reason = FinishReason.STOP if each.finished else None

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def started(self) -> bool:
        return self._started is not None

    @property
    def finished(self) -> bool:
        return self._usage is not None

    @property
    def num_received(self) -> int:
        """Grows with every new token and prompt logprob."""
        return len(self._prompt_logprobs) + sum(len(choice.token_ids) for choice in self._choices.values())

    def next_call(self) -> pb.GenerateRequest:
        """The request for the next call: the original one until a call has started, then one that resumes.

        Each resume has a higher attempt than all calls before it, because a lost call may still be live at its router.
        """
        self.num_calls += 1
        self.is_answered = False
        if self._started is None:
            return self._request
        self._attempt += 1
        self._num_resumes += 1
        if self._bare is None:
            self._bare = _without_input(self._request)
        request = pb.GenerateRequest()
        request.CopyFrom(self._bare)
        self._has_brought_items, self._brings_items = self._brings_items, False
        if self._has_brought_items:
            request.items.extend(_items_of(self._request))
        request.model = self._started.model
        request.sampling.CopyFrom(self._started.sampling)
        resume = request.resume
        resume.attempt = self._attempt
        resume.prompt_token_ids.extend(self._started.prompt_token_ids)
        resume.fingerprint = self._started.fingerprint
        resume.prompt_logprobs_delivered = self._prompt_logprobs_whole or self._request.resume.prompt_logprobs_delivered
        resume.items.extend(self._started.items)
        for index, choice in sorted(self._choices.items()):
            resume.choices.add(
                index=index,
                output_token_ids=choice.token_ids,
                text_bytes_delivered=choice.num_bytes_before + sum(len(text.encode()) for text in choice.texts),
                finished=choice.finish_reason is not None,
            )
        return request

    def bring_items(self) -> bool:
        """Has the next resume bring the request's items, which its router has not got.

        Returns False if the last one did, or there are none.
        """
        self._brings_items = not self._has_brought_items and next(_items_of(self._request), None) is not None
        return self._brings_items

    def attach_call(self) -> pb.AttachRequest:
        """The request that attaches to the stream, and states what is held."""
        self.num_calls += 1
        self.is_answered = False
        request = pb.AttachRequest(request_id=self.request_id)
        if self._prompt_logprobs:
            request.prompt_logprobs_end = 1 + len(self._prompt_logprobs)
        for index, choice in sorted(self._choices.items()):
            request.choices.add(
                index=index,
                num_tokens=len(choice.token_ids),
                text_bytes=sum(len(text.encode()) for text in choice.texts),
                finished=choice.finish_reason is not None,
            )
        return request

    @property
    def is_parsed(self) -> bool:
        """True if deltas have come: a resume needs to know the tools that they are about."""
        return any(choice.contents for choice in self._choices.values())

    def accept(self, message: pb.GenerateResponse) -> StreamEvent | None:
        """Takes a message and returns what is new in it, or None. Raises ProtocolError."""
        kind = message.WhichOneof("event")
        if kind == "started":
            return self._accept_started(message.started)
        if self._started is None:
            raise ProtocolError(f"the stream began with {kind or 'an empty message'}, not with started")
        if self.finished:
            return None
        if kind == "chunk":
            return self._accept_chunk(message.chunk)
        if kind == "prompt_logprobs":
            return self._accept_prompt_logprobs(message.prompt_logprobs)
        if kind == "finished":
            return self._accept_finished(message.finished)
        raise ProtocolError("a message with no event that this client knows: is the server newer?")

    def generation(self) -> Generation:
        """The output so far, or the whole result once finished."""
        started = self._started or pb.Started(request_id=self.request_id)
        return Generation(
            request_id=self.request_id,
            model=started.model,
            seed=started.seed,
            prompt_token_ids=tuple(started.prompt_token_ids),
            choices=tuple(self._choice(index) for index in range(self._num_choices)),
            prompt_logprobs=tuple(self._prompt_logprobs),
            usage=self._usage,
            fingerprint=started.fingerprint,
            num_resumes=self._num_resumes,
        )

    @property
    def _num_choices(self) -> int:
        return max(1, (self._started or self._request).sampling.n)

    @property
    def _prompt_logprobs_whole(self) -> bool:
        assert self._started is not None
        wanted = self._started.sampling.HasField("prompt_logprobs")
        return wanted and len(self._prompt_logprobs) == len(self._started.prompt_token_ids) - 1

    def _choice(self, index: int) -> Choice:
        state = self._choices.get(index) or _ChoiceState()
        return Choice(
            index=index,
            text=state.text,
            token_ids=tuple(state.token_ids),
            logprobs=tuple(state.logprobs),
            finish_reason=state.finish_reason,
            stop=state.stop,
            exact=state.exact,
            content="".join(state.contents),
            reasoning="".join(state.reasonings),
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.name, arguments="".join(call.arguments)) for call in state.calls
            ),
        )

    def _accept_started(self, started: pb.Started) -> Started | None:
        self.is_answered = True
        self._attempt = max(self._attempt, started.attempt)
        if self._started is None:
            self._started = started
            return Started(
                request_id=started.request_id,
                model=started.model,
                seed=started.seed,
                prompt_token_ids=tuple(started.prompt_token_ids),
            )
        held = self._started
        for name in ("request_id", "seed", "prompt_token_ids", "items"):
            if getattr(started, name) != getattr(held, name):
                raise ProtocolError(f"the resumed request {self.request_id} has another {name} than before")
        return None

    def _accept_chunk(self, chunk: pb.Chunk) -> Delta | None:
        if chunk.index >= self._num_choices:
            raise ProtocolError(f"a chunk of choice {chunk.index}, but n is {self._num_choices}")
        state = self._choices.setdefault(chunk.index, _ChoiceState())
        held = len(state.token_ids)
        if chunk.first_token > held:
            raise ProtocolError(f"choice {chunk.index}: a gap; tokens {held} to {chunk.first_token - 1} are missing")
        if state.finish_reason is not None or chunk.first_token < held:
            if chunk.first_token + len(chunk.token_ids) > held:
                # The text of a chunk cannot be cut between tokens.
                raise ProtocolError(
                    f"choice {chunk.index}: a chunk from token {chunk.first_token} reaches past the {held} held"
                )
            return None
        logprobs = tuple(map(PositionLogprobs.from_proto, chunk.logprobs))
        state.token_ids.extend(chunk.token_ids)
        state.logprobs.extend(logprobs)
        # Once inexact, always inexact: tokens from a replica of other numerics stay in the output.
        state.exact = state.exact and chunk.exact
        if chunk.text:
            state.texts.append(chunk.text)
        content = "".join(delta.content for delta in chunk.deltas)
        reasoning = "".join(delta.reasoning for delta in chunk.deltas)
        calls = tuple(
            ToolCallPiece(index=piece.index, id=piece.id, name=piece.name, arguments=piece.arguments)
            for piece in (delta.tool_call for delta in chunk.deltas if delta.HasField("tool_call"))
        )
        if chunk.deltas:
            state.contents.append(content)
            state.reasonings.append(reasoning)
            for piece in calls:
                state.add_call(piece)
        if chunk.HasField("finish"):
            if chunk.finish.reason not in FINISH_REASONS:
                raise ProtocolError(f"choice {chunk.index}: unknown finish reason {chunk.finish.reason}")
            state.finish_reason = FINISH_REASONS[chunk.finish.reason]
            stop = chunk.finish.WhichOneof("stop")
            state.stop = getattr(chunk.finish, stop) if stop else None
        return Delta(
            index=chunk.index,
            text=chunk.text,
            token_ids=tuple(chunk.token_ids),
            logprobs=logprobs,
            finish_reason=state.finish_reason,
            stop=state.stop,
            content=content,
            reasoning=reasoning,
            tool_calls=calls,
        )

    def _accept_prompt_logprobs(self, frame: pb.PromptLogprobs) -> PromptScored | None:
        next_position = 1 + len(self._prompt_logprobs)
        if frame.first_position > next_position:
            raise ProtocolError(
                f"prompt logprobs: a gap; positions {next_position} to {frame.first_position - 1} are missing"
            )
        new = tuple(map(PositionLogprobs.from_proto, frame.logprobs[next_position - frame.first_position :]))
        self._prompt_logprobs.extend(new)
        return PromptScored(first_position=next_position, logprobs=new) if new else None

    def _accept_finished(self, finished: pb.Finished) -> Finished:
        running = [i for i in range(self._num_choices) if self._choice(i).finish_reason is None]
        if running:
            raise ProtocolError(f"the request finished before its choices {running}")
        usage = finished.usage
        self._usage = Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            draft_tokens=usage.draft_tokens,
            accepted_draft_tokens=usage.accepted_draft_tokens,
        )
        return Finished(usage=self._usage)


def _without_input(request: pb.GenerateRequest) -> pb.GenerateRequest:
    bare = pb.GenerateRequest()
    bare.CopyFrom(request)
    bare.ClearField("input")
    bare.ClearField("items")
    bare.ClearField("resume")
    if request.parse_output:
        # Its tools say what a call is.
        bare.chat.CopyFrom(request.chat)
        bare.chat.ClearField("messages")
    return bare


def _items_of(request: pb.GenerateRequest) -> Iterator[pb.Item]:
    """Yields a request's items, in the order of their placeholders."""
    for message in request.chat.messages:
        yield from (part.item for part in message.parts if part.HasField("item"))
    yield from request.items
