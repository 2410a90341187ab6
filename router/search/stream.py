"""One live beam search: asks a replica for the tokens that may come next, one step after the other.

To the replica each step is a resumed request that has one token to go, with a choice for each beam. The prefix cache
holds the blocks of what was computed before. A step that is lost with its replica is asked again, and since the search
is a pure function of the answers, nothing else is to be recovered.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from protos import inference_pb2 as pb
from protos import scheduler_pb2 as wire
from router.accepted import Request
from router.errors import Internal
from router.search.messages import end_ids, finish, new_search, step_sampling
from router.security.identity import RateLimits
from router.streams.choices import Choice
from router.streams.outbox import Outbox
from router.streams.placement import Dispatcher
from router.streams.stream import Stream
from router.telemetry.metrics import RouterMetrics
from router.turns import run_in_slices

log = logging.getLogger("octavo.router.search")

# Tokens of one chunk at the end. With 20 logprobs each, a chunk has 60 KB and takes a millisecond or two.
_CHUNK_TOKENS = 64


class SearchSlices:
    """Runs the steps of searches, which come together, in slices between which the event loop does other work."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], Iterator[None]]] = deque()
        self._is_running = False

    def add(self, work: Callable[[], Iterator[None]]) -> None:
        """Runs what `work` returns when its turn has come."""
        self._waiting.append(work)
        if not self._is_running:
            self._is_running = True
            # Not at once: the searches whose answers come in one message would each have a slice of their own.
            asyncio.get_running_loop().call_soon(run_in_slices, self._run())

    def _run(self) -> Iterator[None]:
        while self._waiting:
            yield from self._waiting.popleft()()
            yield
        self._is_running = False


class SearchStream(Stream):
    """A stream whose choices come at the end: the best outputs that its search has found."""

    def __init__(
        self,
        request: Request,
        choices: list[Choice],
        backlog: list[pb.Chunk],
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        outbox: Outbox,
        limits: RateLimits,
        slices: SearchSlices,
    ) -> None:
        """request: with a beam_search. limits: each step counts as a token for each beam. slices: shared by all."""
        super().__init__(request, choices, backlog, dispatcher, metrics, outbox, limits)
        assert request.beam_search is not None
        self._slices = slices
        self._search = new_search(request.beam_search, request.sampling, request.eos_token_ids)
        # The answer for each live beam, as it comes, and the beams of which the replica may send more.
        self._answers: list[Sequence[pb.TokenLogprob]] = [()]
        self._asked = {0}

    @property
    def num_output_tokens(self) -> int:
        """The tokens of the live beams, which another replica would get; in the end, of the choices."""
        if self._search.done or self.complete:
            return super().num_output_tokens
        return len(self._search.live) * self._search.num_steps

    @property
    def num_tokens_to_come(self) -> int:
        return self.request.sampling.max_tokens - self._search.num_steps

    @property
    def sampling_to_submit(self) -> pb.SamplingParams:
        """Those of a step."""
        return step_sampling(self._search, self.request.sampling.seed)

    def starts(self) -> list[wire.SequenceStart]:
        """The beams that wait for an answer."""
        return [
            wire.SequenceStart(choice=index, output_token_ids=beam.token_ids)
            for index, beam in enumerate(self._search.live)
            if index in self._asked
        ]

    def on_tokens(
        self,
        choice: int,
        first_token: int,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs],
        ended: wire.SequenceFinish | None,
    ) -> None:
        if self.done or choice not in self._asked:
            return
        if ended is not None and ended.reason == pb.FINISH_REASON_CANCELLED:
            self._on_cancelled(ended)
            return
        if ended is not None and ended.reason == pb.FINISH_REASON_ERROR:
            self.fail(Internal(f"beam {choice} could not be computed: {ended.message}"))
            return
        if len(token_ids):
            if first_token != self._search.num_steps or not logprobs:
                position = self._search.num_steps
                self.fail(
                    Internal(f"the replica sent token {first_token} of beam {choice}, not {position} and its logprobs")
                )
                return
            self._answers[choice] = logprobs[0].top
        if ended is None:
            return
        if self._cached_tokens is None:
            self._cached_tokens = ended.num_cached_tokens
        self._asked.discard(choice)
        if not self._asked:
            self.placement.rest()
            self._slices.add(self._go_on)

    def _go_on(self) -> Iterator[None]:
        """Takes a step. An error ends this search, and not the others that wait for their turns."""
        try:
            if not self.done:
                yield from self._advance()
        except Exception:
            log.exception("a beam search failed", extra=self._log_fields)
            self.fail(Internal("the beam search failed: see the router's log"))

    def _advance(self) -> Iterator[None]:
        search = self._search
        if (fewest := min(map(len, self._answers))) < search.num_needed:
            self.fail(Internal(f"the replica sent logprobs of {fewest} tokens: {search.num_needed} were asked for"))
            return
        if self._limits is not None:
            self._limits.spend_tokens(len(search.live))
        search.advance(self._answers)
        if search.done:
            yield from self._deliver()
            return
        self._answers = [()] * len(search.live)
        self._asked = set(range(len(search.live)))
        yield
        if not self.done:
            self.placement.ask_more()

    def _deliver(self) -> Iterator[None]:
        """Sends the best outputs. A resume may have brought some of them."""
        sampling = self.request.sampling
        ends = end_ids(sampling, self.request.eos_token_ids)
        for index, (_, beam) in enumerate(self._search.finished[: sampling.n]):
            token_ids, logprobs = beam.token_ids, beam.logprobs()
            ended = finish(beam, sampling, ends, self._cached_tokens or 0)
            for start in range(0, len(token_ids), _CHUNK_TOKENS):
                if self.done:
                    return
                end = start + _CHUNK_TOKENS
                last = ended if end >= len(token_ids) else None
                super().on_tokens(index, start, token_ids[start:end], logprobs[start:end], last)
                yield

    def _observe(self, choice: int, num_tokens: int) -> None:
        """Leaves out what is about the time between tokens: they come together. Rate limits count beams."""
        if num_tokens:
            self._last_token_at[choice] = time.monotonic()
            self._note_first_token(self._last_token_at[choice])
            self._metrics.generation_tokens.inc(num_tokens)
