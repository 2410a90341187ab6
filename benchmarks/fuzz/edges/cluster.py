"""A router and a scheduler without a model, in this process, and good requests that check that both still work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from configs import features
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.server import RouterServer
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler, model_info

# Keeps accepted requests short.
MAX_MODEL_LEN = 64
_GOOD = pb.GenerateRequest(prompt="Hello there", sampling=pb.SamplingParams(max_tokens=3, temperature=0))
_END_S = 10.0
# More tokens than any beam search needs.
_LIKELY = [(token_id, -0.1 * token_id) for token_id in range(20, 120)]

REQUESTS = (
    _GOOD,
    pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        request_id="fuzzed",
        sampling=pb.SamplingParams(
            n=2,
            max_tokens=4,
            min_tokens=1,
            seed=7,
            stop=["ab", "\n\n"],
            stop_token_ids=[9],
            logit_bias={5: 1.0},
            logprobs=2,
            prompt_logprobs=1,
            top_k=5,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.1,
            temperature=0.7,
            allowed_token_ids=[5, 6],
            bad_words=["no"],
            bad_word_token_ids=[pb.TokenIds(ids=[8, 9])],
            logprob_token_ids=[5, 7],
            repetition_detection=pb.RepetitionDetection(max_pattern_size=4, min_count=3),
        ),
        cache_salt="salt",
        session_key="session",
        priority=1,
    ),
    pb.GenerateRequest(
        sampling=pb.SamplingParams(n=2, max_tokens=4, seed=7, stop=["xyz"]),
        resume=pb.Resume(
            attempt=1,
            prompt_token_ids=[5, 6],
            fingerprint="one",
            choices=[
                pb.ResumeChoice(index=0, output_token_ids=[50, 51], text_bytes_delivered=1),
                pb.ResumeChoice(index=1, finished=True),
            ],
        ),
    ),
    pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        sampling=pb.SamplingParams(n=2, max_tokens=4, stop_token_ids=[21], logprobs=2),
        beam_search=pb.BeamSearch(width=3, length_penalty=0.5),
    ),
    *(
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), sampling=pb.SamplingParams(max_tokens=4, constraint=each))
        for each in (
            pb.Constraint(json_schema='{"properties": {"a": {"enum": ["x", 1]}}}', disable_any_whitespace=True),
            pb.Constraint(choice=pb.Alternatives(texts=["yes", "no"]), after="</think>"),
            pb.Constraint(regex="[a-z]{2,9}"),
        )
    ),
)


def _chat() -> pb.GenerateRequest:
    request = pb.GenerateRequest(sampling=pb.SamplingParams(max_tokens=2))
    request.chat.messages.add(role="user", content="Hi")
    request.chat.template_arguments.update({"tools": [{"type": "function", "depth": [1, [2, {"a": None}]]}]})
    return request


def _chat_with_json() -> pb.GenerateRequest:
    request = pb.GenerateRequest(sampling=pb.SamplingParams(max_tokens=2))
    request.chat.messages.add(role="user", content="Hi")
    request.chat.messages.add(role="tool", fields_json='{"tool_calls": [{"function": {"name": "f"}}], "of": null}')
    request.chat.template_arguments_json = '{"tools": [{"type": "function", "depth": [1, [2.5, {"a": null}]]}]}'
    return request


CHAT, CHAT_WITH_JSON = _chat(), _chat_with_json()


class SmallCluster:
    """A router with one scheduler."""

    def __init__(self, router: RouterServer, scheduler: FakeScheduler) -> None:
        self.router, self.scheduler = router, scheduler

    async def check(self) -> None:
        """Checks that a good request streams to its end, and that nothing else is live."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.router.port}") as channel:
            result = await InferenceStub(channel).GenerateUnary(_GOOD, timeout=_END_S)
            assert len(result.choices[0].token_ids) == 3, "a good request does not get its tokens"
        async with asyncio.timeout(_END_S):
            async with self.scheduler.changed:
                await self.scheduler.changed.wait_for(lambda: not self.scheduler.num_live)
        assert not self.router.num_streams, "streams are left"
        self.tidy()

    def tidy(self) -> None:
        """Clears what the fake records for tests."""
        for kept in (self.scheduler.submitted, self.scheduler.cancelled, self.scheduler.prompts):
            kept.clear()


@asynccontextmanager
async def small_cluster(directory: Path, **options: Any) -> AsyncIterator[SmallCluster]:
    scheduler = FakeScheduler(
        socket_address(directory, "one"),
        model=model_info(max_model_len=MAX_MODEL_LEN),
        features=features.OF_WORKERS | features.OF_SCHEDULERS | {features.CONSTRAINT, features.THINKING_BUDGET},
        likely=lambda _: _LIKELY,
    )
    async with running_schedulers(scheduler), running_router([scheduler.address], **options) as (router, _):
        await router.wait_ready()
        yield SmallCluster(router, scheduler)
