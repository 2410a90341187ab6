"""One live request: its choices, the replica that computes it, and the outbox that its client reads."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from protos import inference_pb2 as pb
from protos import scheduler_pb2 as wire
from router.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    Internal,
    InvalidRequest,
    RequestError,
    SlowReader,
    Superseded,
)
from router.replicas.session import Session
from router.request import EndedRequest, Request, finish_reason_name
from router.streams.choices import MOST_RESUBMISSIONS, Choice, Delta, refold, submission
from router.streams.outbox import Outbox, OutboxFullError
from router.telemetry.metrics import RouterMetrics
from router.text.tokenizer import TokenTable
from runtime.wire import SESSION_PART_TOKENS

log = logging.getLogger("octavo.router.streams")

# cached_tokens come with the scheduler's word on the end of a choice; one cut at a stop string waits so long for it.
_USAGE_WAIT_S = 1.0


class Mover(Protocol):
    """Finds another replica for a stream; router.streams.dispatcher."""

    def move(self, stream: "Stream", cause: str) -> None: ...

    def retry(self, stream: "Stream", rejected: wire.Rejected) -> None: ...

    def forget(self, stream: "Stream") -> None: ...


class Stream:
    """Owns a group of a Session (session.GroupOwner) and fills the outbox that the client's call empties."""

    def __init__(
        self, request: Request, table: TokenTable, mover: Mover, metrics: RouterMetrics, outbox: Outbox
    ) -> None:
        """outbox: what its client reads. Raises InvalidRequest if a resume contradicts itself."""
        self.request = request
        self.outbox = outbox
        self.session: Session | None = None
        # The last one that had it, as its Welcome named it.
        self.replica = ""
        self.fingerprint = ""
        self.exact = True
        # How often it was lost or moved.
        self.num_resubmissions = 0
        # Sessions that refused it.
        self.refused_by: list[Session] = []
        self._group = 0
        # How often in a row it was lost without a token in between, and how many it had the last time.
        self._num_losses = self._num_tokens_when_lost = 0
        self._mover = mover
        self._metrics = metrics
        self._choices = [Choice(i, request.sampling, request.eos_token_ids, table) for i in range(request.sampling.n)]
        self._cached_tokens: int | None = None
        self._failure: RequestError | None = None
        self._arrival = request.arrival
        self.first_token_at: float | None = None
        self._last_token_at: dict[int, float] = {}
        # Position after the last prompt logprob passed on.
        self._prompt_logprobs_end = 1
        self._backlog: list[pb.Chunk] = []
        if request.resume is not None:
            self._backlog = refold(self._choices, request.resume, request.sampling)
        self._num_brought = [len(choice.token_ids) for choice in self._choices]

    @property
    def done(self) -> bool:
        """Nothing more is computed for it, by success or failure."""
        return self.outbox.closed

    @property
    def complete(self) -> bool:
        """Every choice has ended."""
        return all(choice.finish is not None for choice in self._choices)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def _log_fields(self) -> dict[str, str]:
        return self.request.log_fields

    # --- towards the replica

    def note_loss(self) -> int:
        """Its replica is lost. Returns how many have been, in a row and without a new token."""
        if self.num_output_tokens > self._num_tokens_when_lost:
            self._num_losses = 0
        self._num_tokens_when_lost = self.num_output_tokens
        self._num_losses += 1
        self.num_resubmissions += 1
        return self._num_losses

    def begin(self, session: Session | None, *, exact: bool) -> None:
        """Says Started and submits. session: None if a resume brings a complete output."""
        if session is not None:
            self.fingerprint = session.welcome.model.fingerprint
        elif self.request.resume is not None:
            self.fingerprint = self.request.resume.fingerprint
        self._set_exact(exact)
        request = self.request
        self._metrics.prompt_tokens.inc(len(request.prompt_token_ids))
        started = pb.Started(
            request_id=request.request_id,
            seed=request.sampling.seed,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            fingerprint=self.fingerprint,
            model=request.model,
            attempt=request.attempt,
        )
        # A prompt alone may be larger than the buffer.
        self.outbox.put(pb.GenerateResponse(started=started), counted=False)
        for chunk in self._backlog:
            chunk.exact = self.exact
            self.outbox.put(pb.GenerateResponse(chunk=chunk), counted=False)
        self._backlog = []
        if session is not None:
            self.submit_to(session)
        else:
            self._finish_if_complete()

    def submit_to(self, session: Session) -> None:
        """Hands the unfinished choices to a replica, with their tokens so far."""
        if self.fingerprint != session.welcome.model.fingerprint:
            self._set_exact(False)
        submit = submission(
            self.request,
            self._choices,
            replica_id=session.welcome.replica_id,
            num_resubmissions=self.num_resubmissions,
            wants_prompt_logprobs=not self._prompt_logprobs_delivered,
        )
        try:
            self._group = session.submit(submit, self.request.prompt_token_ids, self)
        except RequestError as error:
            self.fail(error)
            return
        self.session, self.replica = session, session.welcome.replica_id

    @property
    def can_leave(self) -> bool:
        """Whether another replica can go on with it: that takes a message that brings its tokens so far."""
        return (
            self.session is not None
            and not self.done
            and not self.complete
            and self.num_output_tokens <= SESSION_PART_TOKENS
            and self.num_resubmissions < MOST_RESUBMISSIONS
        )

    @property
    def num_tokens_to_come(self) -> int:
        """At most, of the choice that has most to come."""
        most = self.request.sampling.max_tokens
        return max((most - len(choice.token_ids) for choice in self._choices if choice.finish is None), default=0)

    def migrate_to(self, session: Session, cause: str) -> None:
        """Has another replica go on; what the one that has it sends from now on is dropped. Only if `can_leave`."""
        assert self.can_leave
        self.request.trace.left(f"moved: {cause}")
        self._leave(wire.CANCEL_REASON_MOVED)
        self.num_resubmissions += 1
        self.submit_to(session)

    def fail(self, error: RequestError, reason: wire.CancelReason = wire.CANCEL_REASON_CLIENT) -> None:
        """Ends the stream; what has been computed is still delivered, except to a slow reader."""
        if not self.done:
            self.outbox.close(error, discard=isinstance(error, SlowReader))
        self._leave(reason)

    def close(self) -> None:
        """The client's call has ended, however it did."""
        request = self.request
        overdue = request.deadline is not None and time.monotonic() >= request.deadline
        self.fail(
            DeadlineExceeded("the deadline passed") if overdue else Cancelled("the client went away"),
            wire.CANCEL_REASON_DEADLINE if overdue else wire.CANCEL_REASON_CLIENT,
        )
        self._metrics.request_latency.observe(time.monotonic() - self._arrival)

    # --- from the replica (session.GroupOwner)

    def on_tokens(
        self,
        choice: int,
        first_token: int,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs],
        ended: wire.SequenceFinish | None,
    ) -> None:
        if choice >= len(self._choices):
            self.fail(Internal(f"the replica sent tokens of choice {choice}, of {len(self._choices)}"))
            return
        folded = self._choices[choice]
        if ended is not None and folded.finish is None and ended.reason == pb.FINISH_REASON_CANCELLED:
            self._on_cancelled(ended)
            return
        if ended is not None:
            self._note_end(choice, ended)
        if folded.finish is not None:
            # Cut at a stop string; what comes later is dropped, but may be what the usage waited for.
            self._finish_if_complete()
            return
        if self.done:
            return
        try:
            piece = folded.advance(first_token, token_ids, logprobs, ended)
        except RequestError as error:
            log.error("%s", error, extra=self._log_fields)
            self.fail(error)
            return
        if piece is None:
            return
        self._observe(choice, len(piece.token_ids))
        self._send_piece(piece)
        if folded.finish is None or self.done:
            return
        if ended is None and self.session is not None:
            self.session.cancel(self._group, [choice], wire.CANCEL_REASON_STOP)
        self._finish_if_complete()

    def on_prompt_logprobs(self, frame: pb.PromptLogprobs) -> None:
        # Choices of a group send the same ones, and so does the next replica after a loss.
        known = self._prompt_logprobs_end - frame.first_position
        if self.done or known < 0 or known >= len(frame.logprobs):
            return
        passed_on = pb.PromptLogprobs(first_position=self._prompt_logprobs_end, logprobs=frame.logprobs[known:])
        self._choices[0].fill_prompt_token_bytes(passed_on.logprobs)
        self._prompt_logprobs_end += len(passed_on.logprobs)
        try:
            self.outbox.put(pb.GenerateResponse(prompt_logprobs=passed_on))
        except OutboxFullError:
            self._end_slow_reader()

    def on_rejected(self, rejected: wire.Rejected) -> None:
        session, self.session = self.session, None
        self.request.trace.left(f"refused: {rejected.message}")
        if self.done:
            return
        if rejected.reason in (wire.REJECT_REASON_QUEUE_FULL, wire.REJECT_REASON_DRAINING):
            if session is not None:
                self.refused_by.append(session)
            self._mover.retry(self, rejected)
        elif rejected.reason == wire.REJECT_REASON_DUPLICATE:
            self.fail(DuplicateRequest(rejected.message))
        elif rejected.reason == wire.REJECT_REASON_SUPERSEDED:
            self.fail(Superseded(rejected.message))
        else:
            self.fail(InvalidRequest(rejected.message))

    def on_lost(self, cause: str) -> None:
        self.session = None
        self.request.trace.left(cause)
        if not self.done:
            if self.complete:
                self._send_finished()
            else:
                self._mover.move(self, cause)

    # --- inside

    @property
    def _prompt_logprobs_delivered(self) -> bool:
        request = self.request
        brought = request.resume is not None and request.resume.prompt_logprobs_delivered
        return brought or self._prompt_logprobs_end >= len(request.prompt_token_ids)

    def _set_exact(self, exact: bool) -> None:
        if self.exact and not exact:
            self.exact = False
            self._metrics.inexact_resumes.inc()
            log.warning("goes on, not exactly, on a replica of another fingerprint", extra=self._log_fields)

    def _send_piece(self, piece: Delta) -> None:
        piece.exact = self.exact
        try:
            self.outbox.put_piece(piece)
        except OutboxFullError:
            self._end_slow_reader()

    def _end_slow_reader(self) -> None:
        self.fail(
            SlowReader(
                "the client reads more slowly than tokens come and stream_buffer_bytes of them wait: "
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
            # The replica gave it up, as a drain does at its end: another one goes on.
            self._leave(wire.CANCEL_REASON_CLIENT)
            self._mover.move(self, ended.message or "the replica gave the request up")

    def _note_end(self, choice: int, ended: wire.SequenceFinish) -> None:
        if self._cached_tokens is None or choice == 0:
            self._cached_tokens = ended.num_cached_tokens
        # Of one that was cut at a stop string all is there, whatever became of the step that was under way.
        if ended.reason == pb.FINISH_REASON_ERROR and self._choices[choice].finish is None:
            self._failure = Internal(f"choice {choice} could not be computed: {ended.message}")

    def _finish_if_complete(self) -> None:
        if self.done or not self.complete:
            return
        if self._cached_tokens is None and self.session is not None:
            asyncio.get_running_loop().call_later(_USAGE_WAIT_S, self._send_finished)
        else:
            self._send_finished()

    def _send_finished(self) -> None:
        if self.done:
            return
        if self._failure is not None:
            self.fail(self._failure)
            return
        usage = pb.Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=self._cached_tokens or 0,
            completion_tokens=self.num_output_tokens,
        )
        self.outbox.put(pb.GenerateResponse(finished=pb.Finished(usage=usage)), counted=False)
        self.outbox.close()
        self._leave(wire.CANCEL_REASON_STOP)

    def _leave(self, reason: wire.CancelReason) -> None:
        """Gives the group up, and has the replica drop what it still computes of it."""
        self.request.trace.left()
        session, self.session = self.session, None
        if session is None:
            self._mover.forget(self)
            return
        if not self.complete:
            session.cancel(self._group, [], reason)
        session.leave(self._group)

    def _observe(self, choice: int, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = time.monotonic()
        last = self._last_token_at.get(choice)
        if last is not None:
            self._metrics.inter_token_latency.observe(now - last)
        elif not self._last_token_at:
            self.first_token_at = now
            self._metrics.time_to_first_token.observe(now - self._arrival)
        self._last_token_at[choice] = now
        self._metrics.generation_tokens.inc(num_tokens)

    @property
    def outcome(self) -> str:
        """For metrics, once it has ended well: the first choice's finish."""
        return finish_reason_name(self._choices[0].finish)

    def ended(self) -> EndedRequest:
        """What there is to tell of it, once it is closed."""
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
            finish_reasons=tuple(finish_reason_name(choice.finish) for choice in self._choices),
            num_resubmissions=self.num_resubmissions,
            replica=self.replica,
        )
