"""The engine's thread when its engine fails: no reader waits for ever. Streams are in tests/integration/clients."""

import queue
import threading
from collections.abc import Collection, Mapping
from typing import Any, cast

import pytest

from octavo.client.errors import InvalidRequest, OctavoError, ServerError
from octavo.local.engine_thread import EngineThread
from octavo.local.request import LocalRequest
from octavo.local.running import Running


class FakeRequest:
    """A request of `num_steps` steps. It may be refused, or fail at its first step."""

    def __init__(self, num_steps: int = 1, *, refused: bool = False, fails: bool = False) -> None:
        self.num_left, self.refused, self.fails = num_steps, refused, fails

    @property
    def finished(self) -> bool:
        return self.num_left == 0


class FakeRunning:
    """Steps when the test says so: with None, or with an error of the engine's own."""

    def __init__(self) -> None:
        self.live: Collection[FakeRequest] = []
        self.steps: queue.Queue[Exception | None] = queue.Queue()
        self.num_dropped = 0

    def add(self, request: FakeRequest) -> None:
        if request.refused:
            raise InvalidRequest("too long")
        self.live = [*self.live, request]

    def cancel(self, request: FakeRequest) -> None:
        if request in self.live:
            request.num_left = 0
            self.live = [each for each in self.live if each is not request]

    def step(self) -> object:
        error = self.steps.get()
        if error is not None:
            raise error
        return object()

    def take(self, output: object) -> Mapping[FakeRequest, OctavoError | None]:
        got: dict[FakeRequest, OctavoError | None] = {}
        for each in self.live:
            each.num_left -= 1
            got[each] = ServerError("no memory") if each.fails else None
        self.live = [each for each in self.live if each.num_left and not each.fails]
        return got

    def drop_all(self) -> None:
        self.num_dropped += len(self.live)


class Reader:
    """Receives the news of one request."""

    def __init__(self, thread: EngineThread, request: FakeRequest) -> None:
        self.request = cast(LocalRequest, request)
        self._news: queue.Queue[Exception | None] = queue.Queue()
        thread.submit(self.request, self._news.put)

    def news(self) -> Exception | None:
        return self._news.get(timeout=30)

    @property
    def is_told_no_more(self) -> bool:
        return self._news.empty()


@pytest.fixture
def running() -> FakeRunning:
    return FakeRunning()


@pytest.fixture
def thread(running: FakeRunning) -> EngineThread:
    return EngineThread(cast(Running, cast(Any, running)))


def test_each_step_is_news_until_the_request_has_finished(thread: EngineThread, running: FakeRunning) -> None:
    reader = Reader(thread, FakeRequest(2))
    for _ in range(2):
        running.steps.put(None)
        assert reader.news() is None
    assert reader.request.finished
    thread.close()
    assert reader.is_told_no_more


def test_an_error_is_that_of_its_request(thread: EngineThread, running: FakeRunning) -> None:
    refused, failing = Reader(thread, FakeRequest(refused=True)), Reader(thread, FakeRequest(fails=True))
    other = Reader(thread, FakeRequest(3))
    assert isinstance(refused.news(), InvalidRequest)
    running.steps.put(None)
    assert isinstance(failing.news(), ServerError)
    for _ in range(3):
        running.steps.put(None)
    news = [other.news()]
    while not other.request.finished or not other.is_told_no_more:
        news.append(other.news())
    assert not any(news)
    thread.close()


def test_an_engine_that_breaks_tells_all_now_and_later(thread: EngineThread, running: FakeRunning) -> None:
    readers = [Reader(thread, FakeRequest(5)) for _ in range(2)]
    running.steps.put(MemoryError("the device is gone"))
    for reader in readers:
        assert isinstance(reader.news(), MemoryError)
    thread.close()
    with pytest.raises(MemoryError, match="the device is gone"):
        Reader(thread, FakeRequest())
    with pytest.raises(MemoryError):
        thread.check()
    assert running.num_dropped == 2


def test_a_cancelled_request_is_told_once(thread: EngineThread, running: FakeRunning) -> None:
    reader = Reader(thread, FakeRequest(9))
    thread.cancel(reader.request)
    running.steps.put(None)
    while not reader.request.finished:
        assert reader.news() is None
    # Once more is not an error.
    thread.cancel(reader.request)
    thread.close()


def test_what_runs_at_the_close_is_told(thread: EngineThread, running: FakeRunning) -> None:
    reader = Reader(thread, FakeRequest(9))
    running.steps.put(None)
    assert reader.news() is None
    closing = threading.Thread(target=thread.close)
    with thread._changed:
        closing.start()
        assert thread._changed.wait_for(lambda: thread._is_closing, 30)
    # The step under way ends, and no other begins.
    running.steps.put(None)
    closing.join()
    told = [reader.news() for _ in range(2)]
    assert told[0] is None
    assert "shut down" in str(told[1])
