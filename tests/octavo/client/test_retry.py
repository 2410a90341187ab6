"""When clients retry: never sooner than they are asked to, never past their deadline, and never as a storm."""

import itertools

import grpc
import grpc.aio
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from octavo.client import errors
from octavo.client.assembly import Assembly
from octavo.client.retry import Deadline, RetryBudget, RetryPolicy, Targets
from protos import inference_pb2 as pb


class Calls:
    """A call that raises each failure in turn, then succeeds. Time passes only while it sleeps."""

    def __init__(self, *failures: Exception) -> None:
        self.slept: list[float] = []
        self.num_calls = 0
        self._failures = list(failures)

    @property
    def now(self) -> float:
        return sum(self.slept)

    def __call__(self) -> str:
        self.num_calls += 1
        if self._failures:
            raise self._failures.pop(0)
        return "done"


def run(
    calls: Calls,
    *,
    targets: int = 1,
    timeout: float | None = None,
    retry_for: float = 60.0,
    budget: RetryBudget | None = None,
    assembly: Assembly | None = None,
) -> str:
    policy = RetryPolicy(
        Targets([f"router-{i}" for i in range(targets)]),
        Deadline(timeout),
        retry_for,
        budget or RetryBudget(),
        assembly,
        clock=lambda: calls.now,
    )
    return policy.run(calls, sleep=calls.slept.append)


def overloaded(seconds: float | None = 2.0) -> errors.Overloaded:
    return errors.Overloaded("the queue is full", retry_after_s=seconds)


def test_an_overloaded_server_is_given_the_time_it_asks_for_and_a_little_more():
    calls = Calls(overloaded(2.0), overloaded(8.0))
    assert run(calls, targets=3) == "done"
    assert 2.0 <= calls.slept[0] <= 2.5
    assert 8.0 <= calls.slept[1] <= 10.0
    # Delays are spread, so that clients that were told the same delay do not return together.
    assert len({run_and_sleep(overloaded(2.0)) for _ in range(5)}) > 1


def run_and_sleep(failure: Exception, **arguments: object) -> float:
    calls = Calls(failure)
    run(calls, **arguments)  # type: ignore[arg-type]
    return calls.slept[0]


def test_what_is_unavailable_is_tried_elsewhere_at_once_and_in_the_same_place_as_it_asks():
    unavailable = errors.Unavailable("draining", retry_after_s=4.0)
    assert run_and_sleep(unavailable, targets=2) <= 0.2
    assert run_and_sleep(unavailable) >= 4.0
    assert run_and_sleep(errors.Unavailable("gone")) <= 0.2


def test_an_overload_without_a_word_on_when_to_come_again_is_raised():
    calls = Calls(overloaded(None))
    with pytest.raises(errors.Overloaded):
        run(calls)
    assert calls.num_calls == 1


@pytest.mark.parametrize("bound", [{"timeout": 5.0}, {"retry_for": 5.0}])
def test_a_wait_beyond_the_deadline_or_retry_for_is_not_begun(bound: dict[str, float]):
    calls = Calls(overloaded(6.0))
    with pytest.raises(errors.Overloaded, match="queue is full"):
        run(calls, **bound)  # type: ignore[arg-type]
    assert calls.slept == []


def test_a_client_adds_a_fifth_to_what_it_asks_for_however_busy_the_servers_are():
    budget, num_requests, num_calls = RetryBudget(), 200, 0
    for _ in range(num_requests):
        calls = Calls(*[overloaded(0.1)] * 50)
        with pytest.raises(errors.Overloaded):
            run(calls, budget=budget)
        num_calls += calls.num_calls
    assert num_requests * 1.2 <= num_calls <= num_requests * 1.2 + 10


def test_connections_that_break_cost_nothing_of_the_budget():
    """When a router dies, all streams of a client move: that adds no load."""
    budget = RetryBudget(reserve=1)
    for _ in range(20):
        assert run(Calls(errors.Unavailable("the connection broke")), budget=budget) == "done"
    assert budget.take()


def test_a_stream_that_has_begun_is_not_given_up_for_want_of_a_budget():
    """When a router dies, at most as many calls return at once as were running."""
    assembly = Assembly(pb.GenerateRequest(request_id="r"))
    assembly.accept(pb.GenerateResponse(started=pb.Started(request_id="r")))
    assembly.accept(pb.GenerateResponse(chunk=pb.Chunk(token_ids=[5], text="a")))
    empty = RetryBudget(per_request=0.0, reserve=0)
    assert run(Calls(*[overloaded()] * 3), budget=empty, assembly=assembly) == "done"
    with pytest.raises(errors.Overloaded):
        run(Calls(overloaded()), budget=empty)


def test_a_refusal_after_started_is_no_progress():
    """A router sends Started, a message like any other to the client, before a replica may refuse the request."""
    assembly = Assembly(pb.GenerateRequest(request_id="r"))
    calls = Calls()
    outcomes = itertools.cycle([None, overloaded(2.0)])

    def receive() -> None:
        if (failure := next(outcomes)) is not None:
            raise failure
        assembly.accept(pb.GenerateResponse(started=pb.Started(request_id="r")))

    policy = RetryPolicy(Targets("router"), Deadline(None), 5.0, RetryBudget(), assembly, clock=lambda: calls.now)

    def read() -> None:
        for _ in range(20):
            policy.run(receive, sleep=calls.slept.append)

    with pytest.raises(errors.Overloaded):
        read()
    assert len(calls.slept) == 2


def with_retry_info(seconds: float) -> bytes:
    delay = Duration()
    delay.FromMilliseconds(round(seconds * 1000))
    info, other = AnyMessage(), AnyMessage()
    other.Pack(ErrorInfo(reason="BUSY"))
    info.Pack(RetryInfo(retry_delay=delay))
    return Status(code=8, details=[other, info]).SerializeToString()


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        (with_retry_info(1.25), 1.25),
        (with_retry_info(-3), 0.0),
        (Status(code=8).SerializeToString(), None),
        (b"\xff\xff no such message", None),
        (None, None),
    ],
)
def test_the_time_to_wait_is_read_from_the_statuss_details(details: bytes | None, expected: float | None):
    metadata = grpc.aio.Metadata(("other", "text"))
    if details is not None:
        metadata.add("grpc-status-details-bin", details)
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    error = errors.from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, "busy"))
    assert isinstance(error, errors.Overloaded)
    assert error.retry_after_s == expected


def test_a_call_that_a_server_drops_as_it_shuts_down_is_not_taken_for_cancelled() -> None:
    def raised(details: str) -> errors.OctavoError:
        empty = grpc.aio.Metadata()
        return errors.from_rpc_error(grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, empty, empty, details))

    assert isinstance(raised("CANCELLED"), errors.Unavailable)
    assert isinstance(raised("Cancel was called for this request"), errors.Cancelled)


class Stream:
    """Reads a stream as the clients do: the retry policy applies only where a call is made or has failed."""

    def __init__(self, *messages: tuple[float, pb.GenerateResponse | Exception]) -> None:
        """messages: (seconds after the previous message, message)."""
        self.now = 0.0
        self.assembly = Assembly(pb.GenerateRequest(prompt="hi"))
        self._messages = list(messages)
        self._has_call = False

    def read(self) -> None:
        """Reads all messages. Raises the error with which the policy gives up."""
        policy = RetryPolicy(Targets("one"), Deadline(None), 60.0, RetryBudget(), self.assembly, clock=lambda: self.now)
        while self._messages:
            message = self._receive() if self._is_going_well else policy.run(self._try, sleep=lambda seconds: None)
            self.assembly.accept(message)

    @property
    def _is_going_well(self) -> bool:
        return self._has_call and not isinstance(self._messages[0][1], Exception)

    def _try(self) -> pb.GenerateResponse:
        if not self._has_call:
            self.assembly.next_call()
            self._has_call = True
        return self._receive()

    def _receive(self) -> pb.GenerateResponse:
        seconds, message = self._messages.pop(0)
        self.now += seconds
        if isinstance(message, Exception):
            self._has_call = False
            raise message
        return message


STARTED = pb.GenerateResponse(started=pb.Started(request_id="a", seed=1, prompt_token_ids=[1]))
LOST = errors.Unavailable("the router died")


@pytest.mark.parametrize("before", [(), ((0.0, STARTED),)])
def test_what_was_held_in_peace_has_not_been_failing(before: tuple[tuple[float, pb.GenerateResponse], ...]) -> None:
    """A call is lost; the next ones start, last a minute each and break with their router. Each break counts as a first
    failure."""
    held = ((0.0, STARTED), (61.0, LOST))
    Stream(*before, (0.0, LOST), *held, *held, (0.0, STARTED)).read()


def test_what_is_lost_again_and_again_is_given_up() -> None:
    """The client gives up when no call lasts, answered or not."""
    brief = ((0.0, STARTED), (2.0, LOST))
    for failures in (brief * 40, ((2.0, LOST),) * 40, ((0.0, STARTED), (2.0, LOST), *(((7.0, LOST),) * 10))):
        with pytest.raises(errors.Unavailable):
            Stream(*failures).read()
