"""The parts that the services of SMG's engines share: their messages have fields of the same names."""

import asyncio
import contextlib
import datetime
import hashlib
import io
import json
import time
import uuid
import zipfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import grpc
import grpc.aio

from configs.sampling import FROM_MODEL
from protos import inference_pb2 as pb
from router.api.grpc_errors import grpc_errors, guarded
from router.errors import InvalidRequest, NoReplica, Unavailable
from router.intake.intake import Intake
from router.replicas.replica_set import ReplicaSet
from router.request.checks import check_request_id
from router.streams.outbox import bounded_reading, bounded_write
from router.streams.stream import Stream
from runtime.wire import octavo_version

Context = grpc.aio.ServicerContext

# Files of a tokenizer.
_PATTERNS = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
# Matches them, but is an index of weights: megabytes that no tokenizer needs.
_NOT = "*.safetensors.index.json"
# A fixed date: the same files make the same archive, and sha256, whenever and wherever it is made.
_DATE = (1980, 1, 1, 0, 0, 0)
_CHUNK_BYTES = 64 * 1024

_PROFILE = "profile a worker's process instead"
_NOT_HERE = {
    "Embed": "no embedding model is served",
    "FlushCache": "call octavo.v1.Admin/ResetPrefixCache",
    "StartProfile": _PROFILE,
    "StopProfile": _PROFILE,
}


def refuse_calls(service: Any, reasons: Mapping[str, str]) -> None:
    """Gives a service the methods of calls that do nothing. reasons: what does, by the call's name."""
    for call, instead in reasons.items():
        setattr(service, call, _unimplemented(call, instead))


def _unimplemented(call: str, instead: str) -> Callable[[Any, Context], Awaitable[None]]:
    async def answer(request: Any, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{call} is not supported: {instead}")

    return answer


async def write_replies(
    stream: Stream,
    replies_to: Callable[[pb.GenerateResponse], Iterable[Any]],
    write: Callable[[Any], Awaitable[None]],
) -> None:
    """Writes what becomes of a stream's events, until it ends."""
    with bounded_reading(stream.outbox):
        while events := await stream.outbox.take():
            for event in events:
                for reply in replies_to(event):
                    await write(reply)


async def abort_all(intake: Intake, request_ids: Iterable[str]) -> None:
    """Passes over ids that are not live: a request may end while it is aborted."""
    for request_id in dict.fromkeys(request_ids):
        # An impossible id is not live: nobody else is asked for it.
        with contextlib.suppress(NoReplica, InvalidRequest):
            check_request_id(request_id)
            await intake.live.cancel(request_id)


class EngineService:
    """The calls that the services answer alike: the whole cluster is one engine of one data-parallel rank. The router
    balances, and moves streams that a replica loses."""

    # The module of the service's messages, and the message for a part of the tokenizer.
    messages: ClassVar[Any]
    tokenizer_chunk: ClassVar[Any]

    def __init__(self, intake: Intake, replicas: ReplicaSet) -> None:
        self._intake, self._replicas = intake, replicas
        self._started = time.monotonic()
        self._last_request = 0.0
        self._archive = TokenizerArchive()
        refuse_calls(self, _NOT_HERE)

    def message_of(self, request: Any, request_id: str) -> pb.GenerateRequest:
        """Converts a request. Raises InvalidRequest."""
        raise NotImplementedError

    def replies_to(self, request: Any, request_id: str) -> "EngineReplies":
        raise NotImplementedError

    async def Generate(self, request: Any, context: Context) -> None:
        self._last_request = time.time()
        request_id = request.request_id or uuid.uuid4().hex
        async with grpc_errors(context, request_id):
            replies = self.replies_to(request, request_id)
            opening = self._intake.open(self.message_of(request, request_id), context.time_remaining())
            # It may be large, and the stream may last.
            del request
            async with opening as stream:
                await write_replies(stream, replies.take, context.write)

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        draining = self._intake.draining
        message = "draining" if draining else self._replicas.describe()
        return self.messages.HealthCheckResponse(healthy=self._replicas.num_ready > 0 and not draining, message=message)

    @guarded
    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        """Raises NoReplica before the first replica has said what it serves."""
        model = self._intake.model
        # From generation_config.json: the caller fills them into requests that leave them unset.
        defaults = {
            parameter.name: getattr(model.default_sampling, parameter.name)
            for parameter in FROM_MODEL
            if parameter.given_in(model.default_sampling)
        }
        return self.messages.GetModelInfoResponse(
            model_path=model.name,
            tokenizer_path=model.name,
            served_model_name=model.name,
            is_generation=True,
            model_type=model.architecture,
            architectures=[model.architecture],
            vocab_size=model.vocab_size,
            max_context_length=model.max_model_len,
            max_req_input_len=model.max_model_len - 1,
            eos_token_ids=model.eos_token_ids,
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    @guarded
    async def GetLoads(self, request: Any, context: Context) -> Any:
        """There is rank 0 alone."""
        load = self.load()
        return self.messages.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=f"octavo-{octavo_version()}",
            dp_rank_count=1,
            loads=[] if request.dp_rank else [load],
        )

    async def GetTokenizer(self, request: Any, context: Context) -> None:
        async with grpc_errors(context):
            for data, sha256 in await self._archive.chunks(self._intake.tokenizer.tokenizer.directory):
                with bounded_write():
                    await context.write(self.tokenizer_chunk(data=data, sha256=sha256))

    def load(self) -> Any:
        """Returns a SchedulerLoad: the sum of all replicas. Blocks that can be taken at once count as unused. Raises
        NoReplica."""
        sessions = [replica.session for replica in self._replicas.replicas if replica.session is not None]
        loads, block_size = [session.load for session in sessions], self._intake.model.block_size
        num_blocks = sum(load.num_blocks for load in loads)
        num_used = num_blocks - sum(load.num_free_blocks for load in loads)
        num_running, num_waiting = sum(load.num_running for load in loads), sum(load.num_waiting for load in loads)
        most_running = sum(session.welcome.max_num_seqs for session in sessions)
        return self.messages.SchedulerLoad(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            num_total_reqs=num_running + num_waiting,
            num_used_tokens=num_used * block_size,
            max_total_num_tokens=num_blocks * block_size,
            token_usage=num_used / num_blocks if num_blocks else 0.0,
            utilization=num_running / most_running if most_running else 0.0,
            max_running_requests=most_running,
            num_waiting_uncached_tokens=sum(load.num_queued_tokens for load in loads),
        )


class EngineReplies:
    """Folds one stream. stream: a chunk for new tokens, and at the end `complete` for each choice with the tokens of
    its last chunk, as the engines' own services send it; else only `complete`, with all tokens."""

    # The module of the service's messages.
    messages: ClassVar[Any]
    # The service's words for the ends of outputs; others are "abort".
    finish_reasons: ClassVar[Mapping[int, str]]
    # completion_tokens are those of a choice so far; else those in the reply, and the gateway adds them up.
    counts_all: ClassVar[bool]

    def __init__(self, *, stream: bool, first_scored: int = 0) -> None:
        """first_scored: the prompt token from which on logprobs are told."""
        self._stream, self._first_scored = stream, first_scored
        self._prompt_token_ids: list[int] = []
        # InputLogProbs, and the position after its last one; None without any.
        self._input_logprobs: Any = None
        self._input_end = 0
        # By choice: a GenerateComplete with the tokens that `complete` repeats, the number of tokens, and the finish.
        self._kept: dict[int, Any] = {}
        self._num_tokens: dict[int, int] = {}
        self._finishes: dict[int, pb.Finish] = {}

    def take(self, event: pb.GenerateResponse) -> Iterable[Any]:
        """Takes in an event. Returns what is to be sent for it, each made when its turn comes."""
        match event.WhichOneof("event"):
            case "started":
                self._prompt_token_ids = list(event.started.prompt_token_ids)
            case "prompt_logprobs":
                self._add_input(event.prompt_logprobs.logprobs)
            case "chunk":
                return self._chunk(event.chunk)
            case "finished":
                # Only now is the number of cached tokens known.
                cached_tokens = event.finished.usage.cached_tokens
                return (self._complete(index, cached_tokens) for index in sorted(self._finishes))
        return []

    def _response(self, **kind: Any) -> Any:
        """Makes a reply of a chunk or a `complete`."""
        return self.messages.GenerateResponse(**kind)

    def _chunk(self, chunk: pb.Chunk) -> list[Any]:
        is_first = chunk.index not in self._kept
        if is_first or self._stream:
            self._kept[chunk.index] = self.messages.GenerateComplete()
        kept, told = self._kept[chunk.index], self._output_logprobs(chunk.logprobs)
        kept.output_ids.extend(chunk.token_ids)
        if told is not None:
            # Lists are joined.
            kept.output_logprobs.MergeFrom(told)
        num_new = len(chunk.token_ids)
        self._num_tokens[chunk.index] = self._num_tokens.get(chunk.index, 0) + num_new
        if chunk.HasField("finish"):
            self._finishes[chunk.index] = chunk.finish
        if not self._stream or not chunk.token_ids:
            return []
        answer = self.messages.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=self._num_tokens[chunk.index] if self.counts_all else num_new,
            output_logprobs=told,
            input_logprobs=self._input_logprobs if is_first else None,
            index=chunk.index,
        )
        return [self._response(chunk=answer)]

    def _complete(self, index: int, cached_tokens: int) -> Any:
        finish, kept = self._finishes[index], self._kept.pop(index)
        answer = self.messages.GenerateComplete(
            output_ids=kept.output_ids,
            finish_reason=self.finish_reasons.get(finish.reason, "abort"),
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=self._num_tokens[index] if self.counts_all else len(kept.output_ids),
            cached_tokens=cached_tokens,
            output_logprobs=kept.output_logprobs if kept.HasField("output_logprobs") else None,
            input_logprobs=self._input_logprobs,
            index=index,
        )
        stop = finish.WhichOneof("stop")
        if stop == "stop_string":
            answer.matched_stop_str = finish.stop_string
        elif stop == "stop_token_id":
            answer.matched_token_id = finish.stop_token_id
        return self._response(complete=answer)

    def _add_input(self, logprobs: Sequence[pb.TokenLogprobs]) -> None:
        """Adds an entry a prompt token. That of the first has no value: nothing precedes it."""
        messages = self.messages
        values = [messages.InputTokenLogProb(value=each.chosen.logprob) for each in logprobs]
        tops = list(map(self._top, logprobs))
        if self._input_logprobs is None:
            first = self._first_scored
            self._input_logprobs = messages.InputLogProbs(token_ids=self._prompt_token_ids[first:])
            values, tops = [messages.InputTokenLogProb(), *values], [messages.TopLogProbs(), *tops]
        # Those before the first one that is told are left out.
        skipped = max(self._first_scored - self._input_end, 0)
        self._input_end += len(values)
        self._input_logprobs.token_logprobs.extend(values[skipped:])
        self._input_logprobs.top_logprobs.extend(tops[skipped:])

    def _output_logprobs(self, logprobs: Sequence[pb.TokenLogprobs]) -> Any:
        """Returns None without any."""
        if not logprobs:
            return None
        told = self.messages.OutputLogProbs(
            token_logprobs=[each.chosen.logprob for each in logprobs],
            token_ids=[each.chosen.token_id for each in logprobs],
        )
        self._tops_of(told).extend(map(self._top, logprobs))
        return told

    def _tops_of(self, told: Any) -> Any:
        """Returns the field of OutputLogProbs that tells of other tokens."""
        return told.top_logprobs

    def _top(self, logprobs: pb.TokenLogprobs) -> Any:
        return self.messages.TopLogProbs(
            values=[each.logprob for each in logprobs.top], token_ids=[each.token_id for each in logprobs.top]
        )


# --- The tokenizer's files as one archive, which gateways fetch to tokenize by themselves


def tokenizer_zip(directory: Path) -> tuple[bytes, str]:
    """Returns the archive of a directory with a tokenizer.json, and its sha256 in hexadecimal. Reads the files; takes a
    second for a large vocabulary."""
    paths = {path for pattern in _PATTERNS for path in directory.glob(pattern) if not path.match(_NOT)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(paths):
            if path.is_file():
                archive.writestr(zipfile.ZipInfo(path.name, _DATE), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return data, hashlib.sha256(data).hexdigest()


class TokenizerArchive:
    """Makes the archive once, on a thread, when it is asked for; an error is not cached."""

    def __init__(self) -> None:
        self._made: asyncio.Task[tuple[bytes, str]] | None = None

    async def chunks(self, directory: Path) -> Iterator[tuple[bytes, str]]:
        """Returns parts of the archive, each with the sha256 of the whole if it is the last one, else with an empty
        string. Raises Unavailable."""
        if self._made is None or (self._made.done() and self._made.exception() is not None):
            self._made = asyncio.create_task(asyncio.to_thread(tokenizer_zip, directory))
        try:
            # Several calls may wait for it; one that is cancelled must not cancel it for the others.
            data, sha256 = await asyncio.shield(self._made)
        except OSError as error:
            raise Unavailable(f"the tokenizer's files can't be read: {error.strerror}; try again later") from error
        return _parts(data, sha256)


def _parts(data: bytes, sha256: str) -> Iterator[tuple[bytes, str]]:
    for start in range(0, len(data), _CHUNK_BYTES):
        end = start + _CHUNK_BYTES
        yield data[start:end], sha256 if end >= len(data) else ""
