"""Octavo's gRPC.

It calls the stub directly rather than AsyncClient: the measured cluster may run on this machine, and a client that
keeps results costs more than one that counts tokens.
"""

import time
from typing import Any, Self

import grpc

from octavo.bench.backends.base import Prompt, Served
from octavo.client.async_client import AsyncClient
from octavo.client.connection import key_metadata, open_async_channel
from octavo.client.errors import OctavoError, from_rpc_error
from octavo.reports import RequestTrace
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc


class GrpcBackend:
    takes_text = False

    def __init__(self, target: str, *, api_key: str = "", credentials: grpc.ChannelCredentials | None = None) -> None:
        """target: HOST:PORT. credentials: None for no TLS."""
        self._target, self._api_key, self._credentials = target, api_key, credentials
        # Lengths of prompts of text, as the router counted them.
        self._prompt_tokens: list[int] = []
        # Tokens of prompts, and those of them that the prefix cache had.
        self._num_prompt_tokens = self._num_cached_tokens = 0

    @property
    def told(self) -> dict[str, object]:
        rate = self._num_cached_tokens / self._num_prompt_tokens if self._num_prompt_tokens else 0.0
        return {"api": "grpc", "prefix_hit_rate": round(rate, 4)}

    @property
    def num_prompt_tokens(self) -> int:
        return round(sum(self._prompt_tokens) / len(self._prompt_tokens)) if self._prompt_tokens else 0

    async def __aenter__(self) -> Self:
        self._channel = open_async_channel(self._target, self._credentials)
        # The generated stub's types are those of synchronous channels.
        self._stub: Any = rpc.InferenceStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def served(self) -> Served:
        options: Any = {"api_key": self._api_key, "credentials": self._credentials}
        async with AsyncClient(self._target, retry_for=0.0, **options) as client:
            model = await client.model()
        return Served(
            engine="octavo",
            name=model.name,
            dtype=model.dtype,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
        )

    async def complete(self, prompt: Prompt, seed: int, output_len: int) -> RequestTrace:
        if isinstance(prompt, str):
            request = pb.GenerateRequest(prompt=prompt)
        else:
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
        sampling = request.sampling
        sampling.temperature, sampling.seed, sampling.ignore_eos = 0.0, seed, True
        sampling.max_tokens = sampling.min_tokens = output_len
        trace = RequestTrace(began=time.perf_counter(), token_times=[], token_counts=[])
        try:
            async for message in self._stub.Generate(request, metadata=key_metadata(self._api_key)):
                if message.HasField("started") and isinstance(prompt, str):
                    self._prompt_tokens.append(len(message.started.prompt_token_ids))
                if message.HasField("finished"):
                    self._num_prompt_tokens += message.finished.usage.prompt_tokens
                    self._num_cached_tokens += message.finished.usage.cached_tokens
                elif message.HasField("chunk") and message.chunk.token_ids:
                    trace.token_times.append(time.perf_counter())
                    trace.token_counts.append(len(message.chunk.token_ids))
        except grpc.RpcError as error:
            failed: OctavoError = from_rpc_error(error)
            trace.error = f"{type(failed).__name__}: {failed}"
        trace.ended = time.perf_counter()
        if not trace.error and trace.num_tokens != output_len:
            trace.error = f"{trace.num_tokens} output tokens came, not {output_len}"
        return trace
