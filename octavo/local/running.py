"""The requests that an engine computes: each is a group of its own, each step of a beam search is one, too.

The outputs of an AsyncLLM's request are kept until its reader takes them."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Protocol

from octavo.client.errors import OctavoError
from octavo.client.requests import Prompt, RequestOptions, SamplingParams
from octavo.client.results import Generation
from octavo.local.engine import Engine, EngineOutput, SequenceOutput
from octavo.local.request import LocalRequest


class OutputFlow:
    """The outputs of one request of an AsyncLLM. Tells its reader that there is something new: what a slow reader has
    missed comes together, in one output."""

    def __init__(self) -> None:
        """Belongs to the running event loop."""
        self.loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._error: Exception | None = None

    def notify(self, error: Exception | None = None) -> None:
        """Notes new output, or the error that ends the request. Callable from any thread."""
        # The loop may have ended: then nobody reads.
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._note, error)

    def _note(self, error: Exception | None) -> None:
        self._error = self._error or error
        self._news.set()

    async def read(self, generation: Callable[[], Generation]) -> AsyncIterator[Generation]:
        """Yields the output so far whenever there is more, until it has finished. Raises the request's error."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._error is not None:
                raise self._error
            yield (now := generation())
            if now.finished:
                return


# A request as the user wrote it.
Asked = tuple[Prompt, SamplingParams | None, RequestOptions]


class Computes(Protocol):
    """Where an LLM computes its requests: in this process, or in workers of its own."""

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        ...

    def compute(self, asked: Sequence[Asked]) -> list[Generation]:
        """Computes requests together; returns their results in order. Raises OctavoError."""
        ...

    def close(self) -> None:
        """Ends processes and frees what is held. May be called twice."""
        ...


class Running:
    """The requests in an engine. Not thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live: dict[int, LocalRequest] = {}
        self._groups = itertools.count(1)

    @property
    def live(self) -> Collection[LocalRequest]:
        return self._live.values()

    def add(self, request: LocalRequest) -> None:
        """Submits a request, unless a resume brought all of its output. Raises InvalidRequest."""
        if request.finished:
            return
        group = next(self._groups)
        request.ask(self._engine, group)
        self._live[group] = request

    def cancel(self, request: LocalRequest) -> None:
        """Ends a request, if it is live: what is left of it counts as cancelled."""
        for group, each in self._live.items():
            if each is request:
                del self._live[group]
                each.cancel(self._engine, group)
                return

    def drop_all(self) -> None:
        """Forgets all requests."""
        for group in self._live:
            self._engine.cancel(group)
        self._live.clear()

    def step(self) -> EngineOutput:
        """Waits for the next step's output, which `take` takes."""
        return self._engine.step()

    def take(self, output: EngineOutput) -> Mapping[LocalRequest, OctavoError | None]:
        """Hands a step's output to its requests. Returns those that have got something, with their errors: a request
        with an error is live no more."""
        got: dict[LocalRequest, OctavoError | None] = {}
        for (group, _), frame in output.prompt_logprobs:
            request = self._live[group]
            request.take_prompt_logprobs(frame)
            got[request] = None
        for sequence in output.sequences:
            group, index = sequence.key
            live = self._live.get(group)
            # None: a sibling has failed in this very step.
            if live is not None:
                got[live] = self._follow(group, live, index, sequence)
        return got

    def _follow(self, group: int, request: LocalRequest, index: int, sequence: SequenceOutput) -> OctavoError | None:
        try:
            if not request.follow(self._engine, group, index, sequence):
                return None
            self._forget(group)
            if not request.finished:
                self.add(request)
        except OctavoError as error:
            self._forget(group)
            return error
        return None

    def _forget(self, group: int) -> None:
        self._engine.cancel(group)
        self._live.pop(group, None)
