"""Placements of streams, without any network: what they do when replicas refuse, are lost or drain."""

import asyncio
import logging
import time

import pytest

from configs.features import CONSTRAINT
from protos import scheduler_pb2 as wire
from protos.inference_pb2 import FINISH_REASON_LENGTH, SamplingParams
from router.accepted import Request, RequestTrace
from router.errors import Internal, QueueFull, RequestError, Unavailable
from router.replicas.session import Session
from router.security.identity import RateLimits
from router.streams.choices import new_choices
from router.streams.outbox import Outbox, WriteQueue
from router.streams.placement import Dispatcher, Placement
from router.streams.states import StreamState
from router.streams.stream import Stream
from router.telemetry.metrics import RouterMetrics
from router.text.tokenizer import Tokenizer
from tests.support.replicas import replica_set


class Trace(RequestTrace):
    def __init__(self) -> None:
        self.causes: list[str] = []

    def left(self, cause: str = "") -> None:
        self.causes.append(cause)


class Letters(Tokenizer):
    """Each token is the letter of its number."""

    def __init__(self) -> None:
        self.special_ids = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def token_text(self, token_id: int) -> str | None:
        return chr(token_id)


class Cluster:
    """A dispatcher and its replicas, each with a Session that has no reader."""

    def __init__(self, *fingerprints: str) -> None:
        self.metrics = RouterMetrics()
        self.replicas = replica_set([f"unix:{number}" for number in range(len(fingerprints))], self.metrics)
        self.dispatcher = Dispatcher(self.replicas, self.metrics)
        for number, fingerprint in enumerate(fingerprints):
            self.open(number, fingerprint)

    def open(self, number: int, fingerprint: str = "one", grammar_engine: str = "") -> Session:
        welcome = wire.Welcome(replica_id=str(number))
        welcome.model.fingerprint, welcome.model.grammar_engine = fingerprint, grammar_engine
        self.replicas.replicas[number].features = frozenset({CONSTRAINT} if grammar_engine else ())
        session = self.replicas.replicas[number].session = Session(welcome)
        return session

    def place(self, *features: str, name: str = "r") -> tuple[Stream, Placement]:
        """A stream of one choice, which a "z" ends."""
        sampling = SamplingParams(n=1, max_tokens=99, stop=["z"])
        request = Request(
            request_id=name,
            scoped_id=name,
            model="m",
            prompt_token_ids=[1, 2],
            sampling=sampling,
            arrival=time.monotonic(),
            trace=Trace(),
            features=frozenset(features),
        )
        outbox, limits = Outbox(2**20, WriteQueue()), RateLimits()
        choices = new_choices(sampling, (), Letters())
        stream = Stream(request, choices, [], self.dispatcher, self.metrics, outbox, limits)
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


def _say(placement: Placement, text: str, finish: wire.SequenceFinish | None = None) -> None:
    """Sends tokens from the stream's replica."""
    assert placement.session is not None
    outputs = wire.StepOutputs(
        groups=[placement._group],
        choices=[0],
        first_tokens=[placement.stream.num_output_tokens],
        num_tokens=[len(text)],
        token_ids=map(ord, text),
    )
    if finish is not None:
        finish.group = placement._group
        outputs.finishes.append(finish)
    placement.session.receive(wire.SchedulerMessage(outputs=outputs))


def _refuse(placement: Placement) -> None:
    assert placement.session is not None
    rejected = wire.Rejected(group=placement._group, reason=wire.REJECT_REASON_QUEUE_FULL, message="full")
    placement.session.receive(wire.SchedulerMessage(rejected=[rejected]))


def _sent(session: Session | None) -> list[wire.RouterMessage]:
    assert session is not None
    sent = [session.outgoing.get_nowait() for _ in range(session.outgoing.qsize())]
    return [message for message in sent if isinstance(message, wire.RouterMessage)]


def _error(stream: Stream) -> RequestError | None:
    try:
        stream.outbox.raise_error()
    except RequestError as error:
        return error
    return None


def _causes(stream: Stream) -> list[str]:
    assert isinstance(stream.request.trace, Trace)
    return stream.request.trace.causes


async def test_a_new_stream_tries_one_other_replica_and_is_refused() -> None:
    cluster = Cluster("one", "one", "one")
    stream, placement = cluster.place()
    first = placement.session
    _refuse(placement)
    assert placement.session not in (None, first)
    _refuse(placement)
    assert isinstance(_error(stream), QueueFull)
    assert (placement.state, placement.session) == (StreamState.ENDED, None)
    assert _causes(stream) == ["refused: full", "refused: full", ""]


async def test_a_stream_that_had_begun_is_parked_and_goes_on_where_a_replica_comes_back() -> None:
    cluster = Cluster("one")
    stream, placement = cluster.place()
    _say(placement, "abc")
    cluster.lose(placement)
    assert (cluster.num_parked, placement.state, placement.session) == (1, StreamState.PARKED, None)
    session = cluster.open(0, "two")
    cluster.replicas._changed()
    await asyncio.sleep(0)  # on a busy machine one slice may not do it all
    assert (cluster.num_parked, placement.state, placement.session) == (0, StreamState.PLACED, session)
    [message] = _sent(session)
    assert (bytes(message.submit.choices[0].output_token_ids), message.submit.attempt) == (b"abc", 1)
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
    _say(placement, "abc")
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
    assert (cluster.num_parked, placement.state) == (0, StreamState.ENDED)


async def test_a_stream_that_replicas_lose_without_a_token_ends_and_each_token_counts_anew() -> None:
    cluster = Cluster(*["one"] * 20)
    stream, placement = cluster.place()
    for _ in range(3):
        cluster.lose(placement)
    _say(placement, "a")
    for _ in range(16):
        assert not stream.done
        cluster.lose(placement)
    assert not stream.done
    cluster.open(0)
    cluster.replicas._changed()
    cluster.lose(placement)
    assert isinstance(error := _error(stream), Unavailable)
    assert "17 replicas in a row" in str(error)


async def test_a_replica_that_goes_once_all_is_complete_ends_the_stream_well() -> None:
    cluster = Cluster("one", "one")
    stream, placement = cluster.place()
    _say(placement, "az")
    assert (stream.complete, placement.state) == (True, StreamState.PLACED), "the replica still tells what was cached"
    cluster.lose(placement)
    assert (placement.state, _error(stream)) == (StreamState.ENDED, None)
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
    assert _causes(stream) == ["moved: drain", ""]


async def test_a_wait_is_told_once_however_often_the_stream_tries() -> None:
    cluster = Cluster("one")
    _, placement = cluster.place()
    cluster.lose(placement)
    for _ in range(5):
        cluster.dispatcher._go_on(placement)
    cluster.open(0)
    cluster.dispatcher._go_on(placement)
    assert placement.state is StreamState.PLACED
    cluster.lose(placement)
    told = [each.kind for each in cluster.metrics.events.since(0)]
    assert told == ["parked", "moved", "parked"]
    cluster.dispatcher.forget(placement)


async def test_a_rest_ends_the_group_so_that_a_loss_does_not_submit_the_stream_a_second_time() -> None:
    """Its Session may end while the message is taken in with which the group ended."""
    cluster = Cluster("one", "one")
    stream, placement = cluster.place()
    session = placement.session
    assert session is not None
    placement.rest()
    assert [message.WhichOneof("message") for message in _sent(session)] == ["submit"], "nothing is left to cancel"
    session.lose("gone")
    assert (placement.state, placement.num_resubmissions, _error(stream)) == (StreamState.RESTING, 0, None)


async def test_a_change_that_the_table_lacks_ends_that_stream_alone(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster("one")
    stream, placement = cluster.place()
    other, _ = cluster.place(name="other")
    session = placement.session
    assert session is not None
    _sent(session)
    with caplog.at_level(logging.ERROR):
        # A replica has it already.
        placement.submit_to(session)
    assert isinstance(error := _error(stream), Internal)
    assert "a stream that is placed can't become placed" in str(error)
    [record] = caplog.records
    assert (record.getMessage(), getattr(record, "request_id", "")) == (str(error), "r")
    assert placement.state is StreamState.ENDED
    [cancel] = _sent(session)
    assert cancel.cancel.group == placement._group
    # Nothing of it happens twice, or to others.
    _say(other.placement, "ab", wire.SequenceFinish(choice=0, reason=FINISH_REASON_LENGTH))
    assert (other.placement.state, _error(other), other.num_output_tokens) == (StreamState.ENDED, None, 2)
    placement.rest()
    placement.on_lost("gone")
    stream.fail(Unavailable("later"))
    assert _error(stream) is error
