"""The routers' requests in the core: what comes in by commands, and what goes out to which router.

No I/O and no clock. `Requests` belongs to the step loop's thread.
"""

from collections import defaultdict
from collections.abc import Iterable

from protos import inference_pb2, scheduler_pb2
from scheduler import commands
from scheduler.core import Core
from scheduler.messages import CoreLoad, FinishReason, RejectReason, SequenceKey, SequenceOutput
from scheduler.outputs import Outbox
from scheduler.sessions import LiveGroup, Sessions, why_not_admitted

_REJECT_REASONS = {
    RejectReason.INVALID: scheduler_pb2.REJECT_REASON_INVALID,
    RejectReason.QUEUE_FULL: scheduler_pb2.REJECT_REASON_QUEUE_FULL,
}

SessionCommand = (
    commands.OpenSession
    | commands.CloseSession
    | commands.SubmitGroup
    | commands.RefuseGroup
    | commands.CancelGroup
    | commands.EndUnsentChoices
)


class Requests:
    """Sessions, the core they share, and an outbox for each."""

    def __init__(self) -> None:
        self._sessions = Sessions()
        self._outboxes: defaultdict[int, Outbox] = defaultdict(Outbox)
        # Sessions that have not been welcomed to the epoch in force.
        self._unwelcomed: set[int] = set()
        self._welcome: scheduler_pb2.Welcome | None = None
        # What each router was told last, but for last_group.
        self._told: tuple[CoreLoad, bool, bool] | None = None
        # None until the first epoch of workers says what there is to schedule.
        self.core: Core | None = None
        self.is_draining = False

    @property
    def has_work(self) -> bool:
        return self.core is not None and self.core.has_work

    # --- In

    def handle(self, command: SessionCommand, now: float) -> None:
        match command:
            case commands.OpenSession():
                self._sessions.open(command.session)
                self._unwelcomed.add(command.session)
            case commands.CloseSession():
                self._close(command.session, now)
            case commands.SubmitGroup():
                self._sessions.note_received(command.session, command.router_group)
                self._submit(command, now)
            case commands.RefuseGroup():
                self._sessions.note_received(command.session, command.router_group)
                self._reject(command.session, command.router_group, command.reason, command.message)
            case commands.CancelGroup():
                group = self._sessions.find(command.session, command.router_group)
                if group is not None:
                    self._cancel(group, command.choices, now, reason=command.reason)
            case commands.EndUnsentChoices():
                self._end_unsent(command)

    def _close(self, session: int, now: float) -> None:
        for group in self._sessions.close(session):
            self._live_core.cancel(group.number, None, now)
        self._outboxes.pop(session, None)
        self._unwelcomed.discard(session)

    def _submit(self, submit: commands.SubmitGroup, now: float) -> None:
        session, router_group = submit.session, submit.router_group
        if self.is_draining:
            text = "this replica is shutting down: submit elsewhere"
            self._reject(session, router_group, scheduler_pb2.REJECT_REASON_DRAINING, text)
            return
        live = self._sessions.live_attempt(submit.request.request_id)
        if refusal := why_not_admitted(submit, live):
            self._reject(session, router_group, *refusal)
            return
        if live is not None:
            self._cancel(live, (), now, superseded=True)
        group = self._sessions.add(submit)
        if group is None:
            return
        if rejection := self._live_core.submit(submit.request, now):
            self._sessions.drop(group)
            self._reject(session, router_group, _REJECT_REASONS[rejection.reason], rejection.message)
        self.collect(self._live_core.take_outputs())

    def _reject(self, session: int, router_group: int, reason: scheduler_pb2.RejectReason, message: str) -> None:
        if session in self._sessions:
            self._outboxes[session].add_rejected(router_group, reason, message)

    def _end_unsent(self, command: commands.EndUnsentChoices) -> None:
        if command.session not in self._sessions:
            return
        outbox = self._outboxes[command.session]
        for choice in command.choices:
            outbox.add_finish(command.router_group, choice, FinishReason.CANCELLED, cancel_reason=command.reason)

    def _cancel(
        self,
        group: LiveGroup,
        choices: tuple[int, ...],
        now: float,
        *,
        reason: scheduler_pb2.CancelReason = scheduler_pb2.CANCEL_REASON_UNSPECIFIED,
        superseded: bool = False,
    ) -> None:
        """choices: empty means all."""
        keys = self._live_core.cancel(group.number, choices or None, now)
        self._end_cancelled(keys, reason=reason, superseded=superseded)

    def expire(self, now: float) -> None:
        """Ends what is past its deadline."""
        if self.core is not None:
            self._end_cancelled(self.core.expire(now), reason=scheduler_pb2.CANCEL_REASON_DEADLINE)

    def _end_cancelled(
        self, keys: Iterable[SequenceKey], *, reason: scheduler_pb2.CancelReason, superseded: bool = False
    ) -> None:
        for key in keys:
            group = self._sessions.get(key[0])
            assert group is not None, "the core knows a group that no Session has"
            self._outboxes[group.session].add_finish(
                group.router_group,
                key[1],
                FinishReason.CANCELLED,
                num_cached_tokens=group.num_cached_tokens.get(key[1], 0),
                cancel_reason=reason,
                superseded=superseded,
            )
            self._sessions.end(key)

    # --- Out

    def collect(self, outputs: Iterable[SequenceOutput]) -> None:
        """Puts outputs of the core into the outboxes; those of sequences cancelled meanwhile are dropped."""
        for output in outputs:
            number, choice = output.key
            group = self._sessions.get(number)
            if group is None or choice not in group.choices:
                continue
            outbox = self._outboxes[group.session]
            if output.token_ids:
                outbox.add_tokens(group.router_group, choice, output.first_token, output.token_ids, output.logprobs)
                group.num_cached_tokens[choice] = output.num_cached_tokens
            if output.finish_reason is not None:
                outbox.add_finish(
                    group.router_group,
                    choice,
                    output.finish_reason,
                    stop_token_id=output.stop_token_id,
                    num_cached_tokens=output.num_cached_tokens,
                    message=output.message,
                )
                self._sessions.end(output.key)

    def collect_prompt_logprobs(self, key: SequenceKey, frame: inference_pb2.PromptLogprobs) -> None:
        """What a sequence that was preempted in its prompt computes again is not told again."""
        group = self._sessions.get(key[0])
        if group is None or key[1] not in group.choices:
            return
        num_known = group.next_prompt_position - frame.first_position
        if num_known >= len(frame.logprobs):
            return
        if num_known > 0:
            del frame.logprobs[:num_known]
            frame.first_position = group.next_prompt_position
        group.next_prompt_position = frame.first_position + len(frame.logprobs)
        self._outboxes[group.session].add_prompt_logprobs(group.router_group, key[1], frame)

    def welcome_all(self, welcome: scheduler_pb2.Welcome) -> None:
        """A new epoch: each router hears of it with its next message."""
        self._welcome = welcome
        self._unwelcomed = set(self._sessions)

    def take_messages(self, *, workers_ready: bool, repeat_load: bool) -> list[tuple[int, list[bytes]]]:
        """Serialized SchedulerMessages by Session. repeat_load: also for routers to whom nothing else is to be said."""
        if self.core is None or self._welcome is None:
            return []
        told = (self.core.load, workers_ready, self.is_draining)
        has_news, self._told = told != self._told, told
        load = _load(*told)
        batch: list[tuple[int, list[bytes]]] = []
        for session in self._sessions:
            is_new = session in self._unwelcomed
            if not (has_news or repeat_load or is_new or session in self._outboxes):
                continue
            load.last_group = self._sessions.last_group(session)
            outbox = self._outboxes.pop(session, None) or Outbox()
            batch.append((session, outbox.take(load, self._welcome if is_new else None)))
        self._unwelcomed.clear()
        return batch

    @property
    def _live_core(self) -> Core:
        assert self.core is not None, "a group was submitted before any Welcome"
        return self.core


def _load(load: CoreLoad, workers_ready: bool, is_draining: bool) -> scheduler_pb2.Load:
    return scheduler_pb2.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        num_queued_tokens=load.num_queued_tokens,
        workers_ready=workers_ready,
        draining=is_draining,
    )
