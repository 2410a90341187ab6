"""Makes the streams of accepted requests."""

import asyncio

from protos import inference_pb2 as pb
from router.accepted import Request
from router.request.outputs import Outputs
from router.search.stream import SearchSlices, SearchStream
from router.security.identity import RateLimits
from router.streams.choices import Choice, new_choices, refold
from router.streams.outbox import Outbox, WriteQueue
from router.streams.placement import Dispatcher
from router.streams.registry import StreamRegistry
from router.streams.stream import Stream
from router.telemetry.metrics import RouterMetrics
from router.text.tokenizer import Tokenizer


class NewStreams:
    def __init__(
        self, registry: StreamRegistry, dispatcher: Dispatcher, metrics: RouterMetrics, *, buffer_bytes: int
    ) -> None:
        """registry, dispatcher: where the streams go once they are made. buffer_bytes: option stream_buffer_bytes."""
        self.registry, self.dispatcher, self.metrics = registry, dispatcher, metrics
        self._buffer_bytes = buffer_bytes
        self._write_queue = WriteQueue()
        # Large resumes fold a slice each in turn.
        self._refold_turn = asyncio.Lock()
        self._slices = SearchSlices()

    async def fold(
        self, request: Request, tokenizer: Tokenizer, outputs: Outputs
    ) -> tuple[list[Choice], list[pb.Chunk]]:
        """Returns the request's choices, with what a resume brings, and what its client lacks. Raises
        InvalidRequest."""
        parsers = outputs.parsers(
            request.parsed_chat,
            request.prompt_token_ids,
            request_id=request.request_id,
            num_choices=request.sampling.n,
            include_reasoning=request.include_reasoning,
        )
        choices = new_choices(request.sampling, request.eos_token_ids, tokenizer, parsers)
        if request.resume is None:
            return choices, []
        return choices, await refold(choices, request.resume, request.sampling, self._refold_turn)

    def make(self, request: Request, choices: list[Choice], backlog: list[pb.Chunk], limits: RateLimits) -> Stream:
        """choices, backlog: from `fold`. limits: the caller's."""
        outbox = Outbox(self._buffer_bytes, self._write_queue)
        made = (request, choices, backlog, self.dispatcher, self.metrics, outbox, limits)
        return Stream(*made) if request.beam_search is None else SearchStream(*made, self._slices)
