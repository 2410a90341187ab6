"""One live request: folds its tokens into its choices, and fills the outbox that its client reads."""

import asyncio
import logging
import time
from collections.abc import Sequence

from protos import inference_pb2 as pb
from protos import scheduler_pb2 as wire
from router.accepted import EndedRequest, Request, finish_reason_name
from router.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    RequestError,
    SlowReader,
    Superseded,
)
from router.replicas.session import for_scheduler
from router.security.identity import RateLimits
from router.streams.choices import Choice, Delta
from router.streams.outbox import TAKEN_BYTES, Outbox, OutboxFullError
from router.streams.placement import Dispatcher
from router.streams.states import StreamState
from router.telemetry.metrics import RouterMetrics

log = logging.getLogger("octavo.router.streams")

# Cached tokens and drafts come with the scheduler's end of a choice; one cut at a stop string waits this long for it.
_USAGE_WAIT_S = 1.0


class Stream:
    """Folds tokens and fills the outbox that the client's call empties. `placement` has its state."""

    def __init__(
        self,
        request: Request,
        choices: list[Choice],
        backlog: list[pb.Chunk],
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        outbox: Outbox,
        limits: RateLimits,
    ) -> None:
        """choices, backlog: from router.streams.choices, with what a resume brought and what its client lacks.
        outbox: what its client reads. limits: its tokens count there as they come, those that a resume brought do
        not."""
        self.request = request
        self.outbox = outbox
        self.placement = dispatcher.open(self)
        self.exact = True
        self._metrics = metrics
        self._limits = limits if limits.are_any else None
        self._choices = choices
        self._cached_tokens: int | None = None
        # Speculation at all replicas that have told its end.
        self._num_draft_tokens = self._num_accepted_tokens = 0
        # Choices cut at a stop string, whose end a replica will tell.
        self._cut: set[int] = set()
        self._failure: RequestError | None = None
        self._arrival = request.arrival
        self.first_token_at: float | None = None
        self._last_token_at: dict[int, float] = {}
        # Position after the last prompt logprob passed on.
        self._prompt_logprobs_end = 1
        self._backlog = backlog
        self._num_brought = [len(choice.token_ids) for choice in self._choices]

    @property
    def done(self) -> bool:
        """True once nothing more is computed for it, after success or failure."""
        return self.placement.state is StreamState.ENDED

    @property
    def complete(self) -> bool:
        """True once every choice has ended."""
        return all(choice.finish is not None for choice in self._choices)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def _log_fields(self) -> dict[str, str]:
        return self.request.log_fields

    @property
    def num_tokens_to_come(self) -> int:
        """Upper bound, for the choice with the most tokens to come."""
        most = self.request.sampling.max_tokens
        return max((most - len(choice.token_ids) for choice in self._choices if choice.finish is None), default=0)

    @property
    def sampling_to_submit(self) -> pb.SamplingParams:
        """A copy without what the replica need not know or compute again."""
        request = self.request
        sampling = for_scheduler(request.sampling)
        brought = request.resume is not None and request.resume.prompt_logprobs_delivered
        if brought or self._prompt_logprobs_end >= len(request.prompt_token_ids):
            sampling.ClearField("prompt_logprobs")
        return sampling

    def starts(self) -> list[wire.SequenceStart]:
        """The unfinished choices, with their tokens so far."""
        return [
            wire.SequenceStart(choice=choice.index, output_token_ids=choice.token_ids)
            for choice in self._choices
            if choice.finish is None
        ]

    # --- transitions

    def begin(self, fingerprint: str, *, exact: bool) -> None:
        """Sends Started, and what a resuming client lacks; also Finished, if the resume brings a complete output."""
        if not exact:
            self.note_inexact()
        request = self.request
        self._metrics.prompt_tokens.inc(len(request.prompt_token_ids))
        # Filled in place: a Started given to the constructor would be copied, and its prompt may be long.
        event = pb.GenerateResponse()
        started = event.started
        started.request_id, started.seed = request.request_id, request.sampling.seed
        started.prompt_token_ids.extend(request.prompt_token_ids)
        started.sampling.CopyFrom(request.sampling)
        started.fingerprint, started.model, started.attempt = fingerprint, request.model, request.attempt
        started.items.extend(request.items)
        # A prompt alone may be larger than the buffer.
        self.outbox.put(event, counted=False)
        for chunk in self._backlog:
            chunk.exact = self.exact
            self.outbox.put(pb.GenerateResponse(chunk=chunk), counted=False)
        self._backlog = []
        self._finish_if_complete()

    def note_inexact(self) -> None:
        """Notes that it continues with another fingerprint."""
        if self.exact:
            self.exact = False
            self._metrics.inexact_resumes.inc()
            log.warning("continues, not exactly, on a replica of another fingerprint", extra=self._log_fields)

    def note_drafts(self, ended: wire.SequenceFinish) -> None:
        """Counts the drafts of a choice that has ended at a replica, which may not be its own any more."""
        self._num_draft_tokens += ended.num_draft_tokens
        self._num_accepted_tokens += ended.num_accepted_tokens

    def finish(self) -> None:
        """Sends Finished: every choice has ended, and nothing more comes from a replica."""
        if self.done:
            return
        if self._failure is not None:
            self.fail(self._failure)
            return
        usage = pb.Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=self._cached_tokens or 0,
            completion_tokens=self.num_output_tokens,
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices),
            draft_tokens=self._num_draft_tokens,
            accepted_draft_tokens=self._num_accepted_tokens,
        )
        self.outbox.put(pb.GenerateResponse(finished=pb.Finished(usage=usage)), counted=False)
        self.outbox.close()
        self.placement.end(wire.CANCEL_REASON_STOP)

    def fail(self, error: RequestError, reason: wire.CancelReason = wire.CANCEL_REASON_CLIENT) -> None:
        """Ends the stream, unless it has ended; what has been computed is still delivered, except to a slow reader.

        reason: for the replica that has it, if one has.
        """
        if not self.done:
            self.outbox.close(error, discard=isinstance(error, SlowReader))
            self.placement.end(reason)

    def close(self) -> None:
        """Ends the stream: the client's call has ended, for whatever reason."""
        request = self.request
        overdue = request.deadline is not None and time.monotonic() >= request.deadline
        self.fail(
            DeadlineExceeded("the deadline passed") if overdue else Cancelled("the client went away"),
            wire.CANCEL_REASON_DEADLINE if overdue else wire.CANCEL_REASON_CLIENT,
        )
        self._metrics.request_latency.observe(time.monotonic() - self._arrival)

    # --- from the Session that has its group; these calls must not block and do not raise

    def on_tokens(
        self,
        choice: int,
        first_token: int,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs],
        ended: wire.SequenceFinish | None,
    ) -> None:
        if choice >= len(self._choices):
            self.fail(Internal(f"the replica sent tokens of choice {choice}: there are {len(self._choices)} choices"))
            return
        folded = self._choices[choice]
        if ended is not None:
            self.note_drafts(ended)
            self._cut.discard(choice)
        if ended is not None and folded.finish is None and ended.reason == pb.FINISH_REASON_CANCELLED:
            self._on_cancelled(ended)
            return
        if ended is not None:
            self._note_end(choice, ended)
        if folded.finish is not None:
            # Cut at a stop string: later tokens are dropped, but its end may be what is awaited.
            self._finish_if_complete()
            return
        if self.done:
            return
        try:
            delta = folded.advance(first_token, token_ids, logprobs, ended)
        except RequestError as error:
            log.error("%s", error, extra=self._log_fields)
            self.fail(error)
            return
        if delta is None:
            return
        self._observe(choice, len(delta.token_ids))
        self._send_delta(delta)
        if folded.finish is None or self.done:
            return
        self._metrics.malformed_tool_calls.inc(folded.num_malformed_calls)
        if ended is None:
            self._cut.add(choice)
            self.placement.cancel_choice(choice)
        self._finish_if_complete()

    def on_prompt_logprobs(self, frame: pb.PromptLogprobs) -> None:
        # All choices of a group send the same ones, and so does the next replica after a loss.
        known = self._prompt_logprobs_end - frame.first_position
        if self.done or known < 0 or known >= len(frame.logprobs):
            return
        # In parts that a reader takes at once, tokens being of about the same size.
        num_parts = -(-frame.ByteSize() // TAKEN_BYTES)
        part = max(-(-len(frame.logprobs) // num_parts), 1)
        try:
            for start in range(known, len(frame.logprobs), part):
                passed_on = pb.PromptLogprobs(
                    first_position=self._prompt_logprobs_end, logprobs=frame.logprobs[start : start + part]
                )
                self._choices[0].fill_prompt_token_bytes(passed_on.logprobs)
                self._prompt_logprobs_end += len(passed_on.logprobs)
                self.outbox.put(pb.GenerateResponse(prompt_logprobs=passed_on))
        except OutboxFullError:
            self._end_slow_reader()

    # --- inside

    def _send_delta(self, delta: Delta) -> None:
        delta.exact = self.exact
        try:
            self.outbox.put_delta(delta)
        except OutboxFullError:
            self._end_slow_reader()

    def _end_slow_reader(self) -> None:
        self.fail(
            SlowReader(
                "the client reads more slowly than tokens arrive, and stream_buffer_bytes of them wait: "
                "resume with the tokens received, and read faster or raise stream_buffer_bytes"
            ),
            wire.CANCEL_REASON_SLOW_READER,
        )

    def _on_cancelled(self, ended: wire.SequenceFinish) -> None:
        if self.done:
            return
        if ended.superseded:
            self.fail(Superseded("a higher attempt of this request has taken over"))
        elif ended.cancel_reason == wire.CANCEL_REASON_DEADLINE:
            self.fail(DeadlineExceeded("the deadline passed"), wire.CANCEL_REASON_DEADLINE)
        elif ended.cancel_reason == wire.CANCEL_REASON_REQUESTED:
            self.fail(Cancelled("Cancel was called for this request, through another router"))
        else:
            # The replica gave it up, as it does at the end of a drain: another one continues.
            self.placement.give_up(ended.message or "the replica gave the request up")

    def _note_end(self, choice: int, ended: wire.SequenceFinish) -> None:
        if self._cached_tokens is None or choice == 0:
            self._cached_tokens = ended.num_cached_tokens
        # A choice cut at a stop string is complete, even if the step under way then failed.
        if ended.reason == pb.FINISH_REASON_ERROR and self._choices[choice].finish is None:
            message = f"choice {choice} could not be computed: {ended.message}"
            self._failure = InvalidRequest(message) if ended.no_token else Internal(message)

    def _finish_if_complete(self) -> None:
        if self.done or not self.complete:
            return
        if (self._cached_tokens is None or self._cut) and self.placement.state is StreamState.PLACED:
            asyncio.get_running_loop().call_later(_USAGE_WAIT_S, self.finish)
        else:
            self.finish()

    def _observe(self, choice: int, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = time.monotonic()
        last = self._last_token_at.get(choice)
        if last is not None:
            self._metrics.inter_token_latency.observe(now - last)
        else:
            self._note_first_token(now)
        self._last_token_at[choice] = now
        self._metrics.generation_tokens.inc(num_tokens)
        if self._limits is not None:
            self._limits.spend_tokens(num_tokens)

    def _note_first_token(self, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
            self._metrics.time_to_first_token.observe(now - self._arrival)

    @property
    def outcome(self) -> str:
        """The first choice's finish, for metrics, once the stream has ended well."""
        return finish_reason_name(self._choices[0].finish)

    def ended(self) -> EndedRequest:
        """Returns the report of a closed stream."""
        return EndedRequest(
            request=self.request,
            ended_at=time.monotonic(),
            first_token_at=self.first_token_at,
            last_token_at=max(self._last_token_at.values(), default=None),
            num_output_tokens=tuple(
                len(choice.token_ids) - brought
                for choice, brought in zip(self._choices, self._num_brought, strict=True)
            ),
            num_cached_tokens=self._cached_tokens or 0,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            finish_reasons=tuple(finish_reason_name(choice.finish) for choice in self._choices),
            num_resubmissions=self.placement.num_resubmissions,
            replica=self.placement.replica,
        )
