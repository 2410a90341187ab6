"""Placements of streams, without any network: what they do when replicas refuse, are lost or drain."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from configs.features import CONSTRAINT
from protos import scheduler_pb2 as wire
from protos.inference_pb2 import PromptLogprobs, SamplingParams, TokenLogprobs
from router.accepted import Request, RequestTrace
from router.errors import QueueFull, RequestError, Unavailable
from router.replicas.dispatcher import Dispatcher, Placement
from router.replicas.policies import POLICIES
from router.replicas.replica import ReplicaOptions
from router.replicas.replica_set import ReplicaSet
from router.replicas.session import Session
from router.telemetry.metrics import RouterMetrics


class Trace(RequestTrace):
    def __init__(self) -> None:
        self.causes: list[str] = []

    def left(self, cause: str = "") -> None:
        self.causes.append(cause)


class FakeStream:
    """A stream of one choice; the test decides how many tokens it gets."""

    def __init__(self, dispatcher: Dispatcher, features: frozenset[str] = frozenset()) -> None:
        self.trace = Trace()
        self.request = Request(
            request_id="r",
            scoped_id="r",
            model="m",
            prompt_token_ids=[1, 2],
            sampling=SamplingParams(max_tokens=99),
            arrival=time.monotonic(),
            trace=self.trace,
            features=features,
        )
        self.done = self.complete = self.finished = False
        self.num_output_tokens, self.num_tokens_to_come = 0, 99
        self.sampling_to_submit = SamplingParams(max_tokens=99)
        self.error: RequestError | None = None
        self.exact = True
        self.placement = dispatcher.open(self)

    def starts(self) -> list[wire.SequenceStart]:
        return [wire.SequenceStart(choice=0, output_token_ids=[5] * self.num_output_tokens)]

    def begin(self, fingerprint: str, *, exact: bool) -> None:
        self.exact = exact

    def note_inexact(self) -> None:
        self.exact = False

    def note_drafts(self, ended: wire.SequenceFinish) -> None:
        pass

    def finish(self) -> None:
        self.done = self.finished = True

    def fail(self, error: RequestError, reason: wire.CancelReason = wire.CANCEL_REASON_CLIENT) -> None:
        if not self.done:
            self.done, self.error = True, error
        self.placement.leave(reason)

    def on_tokens(
        self,
        choice: int,
        first_token: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        ended: wire.SequenceFinish | None,
    ) -> None:
        raise AssertionError

    def on_prompt_logprobs(self, frame: PromptLogprobs) -> None:
        raise AssertionError


class Cluster:
    """A dispatcher and its replicas, each with a Session that has no reader."""

    def __init__(self, *fingerprints: str) -> None:
        self.metrics = RouterMetrics()
        options = ReplicaOptions(router_id="router", model_name="m", silence_timeout=10.0)
        addresses = [f"unix:{number}" for number in range(len(fingerprints))]
        self.replicas = ReplicaSet(addresses, POLICIES["least_loaded"](), options, self.metrics)
        self.dispatcher = Dispatcher(self.replicas, self.metrics)
        for number, fingerprint in enumerate(fingerprints):
            self.open(number, fingerprint)

    def open(self, number: int, fingerprint: str = "one", grammar_engine: str = "") -> Session:
        welcome = wire.Welcome(replica_id=str(number))
        welcome.model.fingerprint, welcome.model.grammar_engine = fingerprint, grammar_engine
        self.replicas.replicas[number].features = frozenset({CONSTRAINT} if grammar_engine else ())
        session = self.replicas.replicas[number].session = Session(welcome)
        return session

    def place(self, *features: str) -> tuple[FakeStream, Placement]:
        stream = FakeStream(self.dispatcher, frozenset(features))
        self.dispatcher.place(stream.placement)
        return stream, stream.placement

    def lose(self, placement: Placement) -> None:
        """Loses the placement's replica, which does not come back."""
        [replica] = [each for each in self.replicas.replicas if each.session is placement.session]
        session, replica.session = replica.session, None
        assert session is not None
        session.lose("gone")

    @property
    def num_parked(self) -> float | None:
        return self.metrics.registry.get_sample_value("octavo_router_held_streams")


def _refuse(placement: Placement) -> None:
    assert placement.session is not None
    rejected = wire.Rejected(group=placement._group, reason=wire.REJECT_REASON_QUEUE_FULL, message="full")
    placement.session.receive(wire.SchedulerMessage(rejected=[rejected]))


def _sent(session: Session | None) -> list[wire.RouterMessage]:
    assert session is not None
    sent = [session.outgoing.get_nowait() for _ in range(session.outgoing.qsize())]
    return [message for message in sent if isinstance(message, wire.RouterMessage)]


async def test_a_new_stream_tries_one_other_replica_and_is_refused() -> None:
    cluster = Cluster("one", "one", "one")
    stream, placement = cluster.place()
    first = placement.session
    _refuse(placement)
    assert placement.session not in (None, first)
    _refuse(placement)
    assert isinstance(stream.error, QueueFull)
    assert not placement.is_placed
    assert stream.trace.causes == ["refused: full", "refused: full", ""]


async def test_a_stream_that_had_begun_is_parked_and_goes_on_where_a_replica_comes_back() -> None:
    cluster = Cluster("one")
    stream, placement = cluster.place()
    stream.num_output_tokens = 3
    cluster.lose(placement)
    assert (cluster.num_parked, placement.is_parked, placement.is_placed) == (1, True, False)
    session = cluster.open(0, "two")
    cluster.replicas._changed()
    await asyncio.sleep(0)  # on a busy machine one slice may not do it all
    assert (cluster.num_parked, placement.is_parked, placement.session) == (0, False, session)
    [message] = _sent(session)
    assert (list(message.submit.choices[0].output_token_ids), message.submit.attempt) == ([5, 5, 5], 1)
    assert not stream.exact
    assert placement.fingerprint == "one", "not the fingerprint that the client was told"


@pytest.mark.parametrize("features", [(), (CONSTRAINT,)])
async def test_the_grammar_engine_counts_for_streams_with_a_constraint_alone(features: tuple[str, ...]) -> None:
    cluster = Cluster("one", "one", "one")
    for replica in cluster.replicas.replicas:
        replica.session = None
    first = cluster.open(0, "one", "texts 1")
    stream, placement = cluster.place(*features)
    assert placement.session is first
    assert placement.fingerprint == ("one+texts 1" if features else "one")
    stream.num_output_tokens = 3
    cluster.open(1, "one", "texts 2")
    same = cluster.open(2, "one", "texts 1")
    cluster.lose(placement)
    assert placement.session is same or not features
    assert stream.exact
    # Then only the one of another version is left.
    if placement.session is same:
        cluster.lose(placement)
    assert stream.exact == (not features)


async def test_a_parked_stream_that_ends_is_forgotten() -> None:
    cluster = Cluster("one")
    stream, placement = cluster.place()
    cluster.lose(placement)
    stream.fail(Unavailable("enough"))
    assert (cluster.num_parked, placement.is_parked) == (0, False)


async def test_a_stream_that_replicas_lose_without_a_token_ends_and_each_token_counts_anew() -> None:
    cluster = Cluster(*["one"] * 20)
    stream, placement = cluster.place()
    for _ in range(3):
        cluster.lose(placement)
    stream.num_output_tokens = 1
    for _ in range(16):
        assert stream.error is None
        cluster.lose(placement)
    assert stream.error is None
    cluster.open(0)
    cluster.replicas._changed()
    cluster.lose(placement)
    assert isinstance(stream.error, Unavailable)
    assert "17 replicas in a row" in str(stream.error)


async def test_a_replica_that_goes_once_all_is_complete_ends_the_stream_well() -> None:
    cluster = Cluster("one", "one")
    stream, placement = cluster.place()
    stream.complete = True
    cluster.lose(placement)
    assert stream.finished
    assert placement.num_resubmissions == 0


async def test_a_stream_that_migrates_leaves_before_it_is_submitted_again() -> None:
    cluster = Cluster("one", "one")
    stream, placement = cluster.place()
    here = placement.session
    [there] = [each.session for each in cluster.replicas.replicas if each.session is not here]
    assert here is not None
    assert there is not None
    assert (cluster.dispatcher.placements_on(here), cluster.dispatcher.placements_on(there)) == ([placement], [])
    placement.migrate_to(there, "drain")
    assert (cluster.dispatcher.placements_on(here), cluster.dispatcher.placements_on(there)) == ([], [placement])
    _, cancel = _sent(here)
    assert cancel.cancel.reason == wire.CANCEL_REASON_MOVED
    [submit] = _sent(there)
    assert submit.submit.attempt == 1
    assert stream.trace.causes == ["moved: drain", ""]


async def test_a_wait_is_told_once_however_often_the_stream_tries() -> None:
    cluster = Cluster("one")
    _, placement = cluster.place()
    cluster.lose(placement)
    for _ in range(5):
        cluster.dispatcher._go_on(placement)
    cluster.open(0)
    cluster.dispatcher._go_on(placement)
    assert placement.is_placed
    cluster.lose(placement)
    told = [each.kind for each in cluster.metrics.events.since(0)]
    assert told == ["parked", "moved", "parked"]
    cluster.dispatcher.forget(placement)
