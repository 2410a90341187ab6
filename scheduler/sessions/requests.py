"""Passes the routers' commands to the core, and sends outputs and cache events back to the right router.

No I/O and no clock. `Requests` belongs to the step loop's thread.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from protos import inference_pb2, scheduler_pb2
from runtime.telemetry.traceparent import trace_id_of
from scheduler.core.core import Core
from scheduler.core.messages import (
    CacheEvent,
    CoreLoad,
    FinishReason,
    RejectReason,
    SequenceEnd,
    SequenceKey,
    StepOutputs,
)
from scheduler.ranks.step_wire import StepTotals
from scheduler.sessions import commands
from scheduler.sessions.cache_watchers import CacheWatchers
from scheduler.sessions.items import ItemMemory, ItemStore
from scheduler.sessions.outgoing import Parcel
from scheduler.sessions.sessions import LiveGroup, OutputColumns, Sessions, split_numbers, why_not_admitted

_REJECT_REASONS = {
    RejectReason.INVALID: scheduler_pb2.REJECT_REASON_INVALID,
    RejectReason.QUEUE_FULL: scheduler_pb2.REJECT_REASON_QUEUE_FULL,
}

# Texts for `explain`.
_CANCEL_CAUSES = {
    scheduler_pb2.CANCEL_REASON_CLIENT: "the client cancelled it or went away",
    scheduler_pb2.CANCEL_REASON_STOP: "a stop string was found",
    scheduler_pb2.CANCEL_REASON_DEADLINE: "its deadline passed",
    scheduler_pb2.CANCEL_REASON_SLOW_READER: "its client reads too slowly",
    scheduler_pb2.CANCEL_REASON_REQUESTED: "Cancel was called, through another router",
    scheduler_pb2.CANCEL_REASON_MOVED: "its router has moved it to another replica",
}

_DISPLACED = "a request of higher priority has taken its place in a full queue: try again later or elsewhere"

SessionCommand = (
    commands.OpenSession
    | commands.CloseSession
    | commands.SubmitGroup
    | commands.RefuseGroup
    | commands.CancelGroup
    | commands.EndUnsentChoices
    | commands.StoreItem
    | commands.RefuseItem
)


class Requests:
    """The Sessions of all routers and the core that they share."""

    def __init__(
        self, items: ItemStore | None = None, publish: Callable[[Sequence[CacheEvent]], None] | None = None
    ) -> None:
        """items: None if no items are taken. publish: called with all changes of the prefix cache."""
        self.items = ItemStore(ItemMemory(0)) if items is None else items
        self._sessions = Sessions()
        # For `take_ended`; read only for callers.
        self.ended: list[LiveGroup] = []
        # None until a Session watches the cache.
        self._cache_watchers = None if publish is None else CacheWatchers(publish)
        self._welcome: scheduler_pb2.Welcome | None = None
        # The load sent last, without last_group and what steps add to, whose growth alone is no reason to send.
        self._told: tuple[CoreLoad, bool, bool, scheduler_pb2.PauseMode, int] | None = None
        # None before the first epoch.
        self._core: Core | None = None
        self._is_draining = False
        self._paused = scheduler_pb2.PAUSE_MODE_NONE

    @property
    def model_name(self) -> str:
        """The model's name, as clients use it; empty before the first epoch."""
        return "" if self._welcome is None else self._welcome.model.name

    def trace_id(self, group: int) -> str:
        """The trace of a live group, by the core's number; empty if it is not traced."""
        found = self._sessions.get(group)
        return "" if found is None else trace_id_of(found.traceparent)

    # --- In

    def begin_epoch(self, core: Core, welcome: scheduler_pb2.Welcome) -> None:
        """Begins an epoch: each router's next message carries the Welcome. core: the same one in all epochs."""
        self._core, self._welcome = core, welcome
        for session in self._sessions:
            session.is_welcomed = False

    def drain(self) -> None:
        """Refuses all submissions from now on."""
        self._is_draining = True

    def pause(self, mode: scheduler_pb2.PauseMode, now: float) -> None:
        """Tells the routers of a pause. ABORT and WAIT refuse submissions until NONE; ABORT cancels all requests."""
        self._paused = mode
        if mode == scheduler_pb2.PAUSE_MODE_ABORT:
            for group in self._sessions.groups:
                self._cancel(group, (), now, reason=scheduler_pb2.CANCEL_REASON_REQUESTED)

    def handle(self, command: SessionCommand, now: float) -> None:
        match command:
            case commands.OpenSession():
                self._sessions.open(command.session)
                if command.watch_cache:
                    if self._cache_watchers is None:
                        self._cache_watchers = CacheWatchers()
                    self._cache_watchers.join(command.session)
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
            case commands.StoreItem():
                self.items.put(command.name, command.data)
            case commands.RefuseItem():
                self._refuse_item(command, now)

    def _close(self, session: int, now: float) -> None:
        for group in self._sessions.close(session):
            self._live_core.cancel(group.number, None, now, cause="its router's Session ended")
            self.items.unpin(group.number)
            self.ended.append(group)
        if self._cache_watchers is not None:
            self._cache_watchers.leave(session)

    def _submit(self, submit: commands.SubmitGroup, now: float) -> None:
        session, router_group = submit.session, submit.router_group
        if self._is_draining:
            text = "this replica is shutting down: submit elsewhere"
            self._reject(session, router_group, scheduler_pb2.REJECT_REASON_DRAINING, text)
            return
        if self._paused in (scheduler_pb2.PAUSE_MODE_ABORT, scheduler_pb2.PAUSE_MODE_WAIT):
            text = "this replica is paused: submit elsewhere, or again once it is resumed"
            self._reject(session, router_group, scheduler_pb2.REJECT_REASON_DRAINING, text)
            return
        live = self._sessions.live_attempt(submit.request.request_id)
        if refusal := why_not_admitted(submit, live):
            self._reject(session, router_group, *refusal)
            return
        names = [span.name for span in submit.request.items]
        if names and (refusal := self.items.refusal(names)):
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
        elif names:
            for name in self.items.pin(group.number, names):
                self._sessions.outbox(session).add_wanted_item(name)
        for number in self._live_core.take_displaced():
            self._drop(number, scheduler_pb2.REJECT_REASON_QUEUE_FULL, _DISPLACED)
        self.collect_ends(self._live_core.take_ends())

    def _drop(self, number: int, reason: scheduler_pb2.RejectReason, message: str) -> None:
        """Rejects a group that the core has given up."""
        group = self._sessions.get(number)
        assert group is not None, "the core knows a group that no Session has"
        self._sessions.drop(group)
        self.items.unpin(number)
        self._reject(group.session, group.router_group, reason, message)

    def _refuse_item(self, refuse: commands.RefuseItem, now: float) -> None:
        """Ends the groups that wait for an item which does not come."""
        core = self._live_core
        for number in self.items.refuse(refuse.name, refuse.reason, refuse.message):
            is_new = core.is_queued(number)
            ends = core.cancel(number, None, now, cause=refuse.message)
            if is_new:
                self._drop(number, refuse.reason, refuse.message)
            else:
                self.collect_ends(
                    dataclasses.replace(end, reason=FinishReason.ERROR, message=refuse.message) for end in ends
                )

    def _reject(self, session: int, router_group: int, reason: scheduler_pb2.RejectReason, message: str) -> None:
        if session in self._sessions:
            self._sessions.outbox(session).add_rejected(router_group, reason, message)

    def _end_unsent(self, command: commands.EndUnsentChoices) -> None:
        if command.session not in self._sessions:
            return
        outbox = self._sessions.outbox(command.session)
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
        """Cancels choices of a group; an empty tuple means all."""
        cause = "a higher attempt took over" if superseded else _CANCEL_CAUSES.get(reason, "")
        ends = self._live_core.cancel(group.number, choices or None, now, cause=cause)
        self.collect_ends(ends, cancel_reason=reason, superseded=superseded)

    def cancel_request(self, request_id: str, now: float) -> int | None:
        """Cancels a request of any router. Returns its attempt, as in Submit; None if none with this id is live."""
        group = self._sessions.live_attempt(request_id)
        if group is None:
            return None
        self._cancel(group, (), now, reason=scheduler_pb2.CANCEL_REASON_REQUESTED)
        return group.attempt

    def expire(self, now: float) -> None:
        """Ends sequences whose deadline has passed."""
        if self._core is not None and (ends := self._core.expire(now)):
            self.collect_ends(ends, cancel_reason=scheduler_pb2.CANCEL_REASON_DEADLINE)

    # --- Out

    def collect(self, outputs: StepOutputs) -> None:
        """Puts the outputs of a step into the outboxes."""
        if len(outputs.groups):
            sessions, router_groups = split_numbers(outputs.groups)
            columns = OutputColumns(
                groups=router_groups,
                choices=outputs.choices,
                first_tokens=outputs.first_tokens,
                num_tokens=outputs.num_tokens,
                token_ids=outputs.token_ids,
                logprobs=outputs.logprobs,
            )
            first = int(sessions[0])
            if (sessions == first).all():
                self._sessions.outbox(first).add_columns(columns)
            else:
                for session in np.unique(sessions).tolist():
                    self._sessions.outbox(session).add_columns(columns.take(np.flatnonzero(sessions == session)))
        if outputs.ends:
            self.collect_ends(outputs.ends)

    def collect_ends(
        self,
        ends: Iterable[SequenceEnd],
        *,
        cancel_reason: scheduler_pb2.CancelReason = scheduler_pb2.CANCEL_REASON_UNSPECIFIED,
        superseded: bool = False,
    ) -> None:
        """Puts ends into the outboxes. cancel_reason, superseded: the reason, if the ends are cancels."""
        for end in ends:
            group = self._sessions.get(end.key[0])
            if end.is_invalid:
                # The group's other sequences end in the same way.
                if group is not None:
                    self._drop(group.number, scheduler_pb2.REJECT_REASON_INVALID, end.message)
                continue
            assert group is not None, "the core knows a group that no Session has"
            self._sessions.outbox(group.session).add_finish(
                group.router_group,
                end.key[1],
                end.reason,
                stop_token_id=end.stop_token_id,
                num_cached_tokens=end.num_cached_tokens,
                message=end.message,
                cancel_reason=cancel_reason,
                superseded=superseded,
                no_token=end.no_token,
                num_draft_tokens=end.num_draft_tokens,
                num_accepted_tokens=end.num_accepted_tokens,
            )
            if (ended := self._sessions.end(end.key)) is not None:
                self.ended.append(ended)
                self.items.unpin(ended.number)

    def collect_prompt_logprobs(self, key: SequenceKey, frame: inference_pb2.PromptLogprobs) -> None:
        """Passes each position on once: a sequence that was preempted in its prompt computes some positions again."""
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
        self._sessions.outbox(group.session).add_prompt_logprobs(group.router_group, key[1], frame)

    def take_ended(self) -> list[LiveGroup]:
        """Returns the groups that have ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def take_messages(
        self, *, steps: StepTotals, workers_ready: bool, repeat_load: bool
    ) -> list[tuple[int, list[Parcel]]]:
        """Returns the messages to routers by Session.

        steps: those that have returned. repeat_load: sends the load even to routers for which there is nothing else.
        """
        if self._core is None or self._welcome is None:
            return []
        if self._cache_watchers is not None:
            for session, events in self._cache_watchers.take(self._core):
                self._sessions.outbox(session).add_cache_events(events)
        state = (self._core.load, workers_ready, self._is_draining, self._paused, len(self._sessions))
        tells_all = repeat_load or state != self._told
        self._told = state
        load: scheduler_pb2.Load | None = None
        batch: list[tuple[int, list[Parcel]]] = []
        for session in self._sessions:
            if not tells_all and session.is_welcomed and session.outbox.is_empty:
                continue
            if load is None:
                load = _load(*state, steps)
            load.last_group = session.last_group
            parcels = session.outbox.take(load, None if session.is_welcomed else self._welcome)
            batch.append((session.number, parcels))
            session.is_welcomed = True
        return batch

    @property
    def _live_core(self) -> Core:
        assert self._core is not None, "a group was submitted before any Welcome"
        return self._core


def _load(
    load: CoreLoad,
    workers_ready: bool,
    is_draining: bool,
    paused: scheduler_pb2.PauseMode,
    num_routers: int,
    steps: StepTotals,
) -> scheduler_pb2.Load:
    return scheduler_pb2.Load(
        last_step=steps.num_steps,
        step_seconds=steps.seconds,
        step_tokens=steps.num_tokens,
        step_context_tokens=steps.num_context_tokens,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        num_queued_tokens=load.num_queued_tokens + load.num_prefill_tokens,
        workers_ready=workers_ready,
        draining=is_draining,
        paused=paused,
        num_routers=num_routers,
        refused_priority=load.refused_priority,
        refused_tenants=dict(load.refused_tenants),
    )
