"""Outputs told apart on their way through a router: in streams, in one answer, and across resumes at every token."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from configs import features
from configs.features import THINKING_BUDGET
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.server import RouterServer
from tests.fakes.routers import Received, receive, running_router, running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import EOS, FakeScheduler, model_info, scripted
from tests.support.parsing import CHAT, Parsed, new_parser, parse

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🎉", "days": [1, 2]}}\n</tool_call>'
OUTPUT = f"<think>\nI look it up.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
TOKENS = smollm2_tokenizer().encode(OUTPUT, add_special_tokens=False)
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


def request(**sampling: object) -> pb.GenerateRequest:
    chat = pb.ChatPrompt(tools=CHAT.tools)
    chat.messages.add(role="user", content="How is the weather in Zürich?")
    params: dict = {"max_tokens": 200, "seed": 7, **sampling}
    return pb.GenerateRequest(chat=chat, request_id="r", parse_output=True, sampling=pb.SamplingParams(**params))


class Client(Received):
    """Puts the deltas of choice 0 together, too."""

    def __init__(self) -> None:
        super().__init__()
        self.parsed = Parsed()

    def add(self, response: pb.GenerateResponse) -> None:
        super().add(response)
        if response.HasField("chunk") and response.chunk.index == 0:
            self.parsed.add(response.chunk.deltas)

    def resume_request(self) -> pb.GenerateRequest:
        resume = super().resume_request()
        resume.parse_output = True
        resume.chat.tools.extend(CHAT.tools)
        return resume


@contextlib.asynccontextmanager
async def router(
    directory: Path, fake: FakeScheduler | None = None, **options: object
) -> AsyncIterator[tuple[RouterServer, InferenceStub, FakeScheduler]]:
    fake = fake or FakeScheduler(
        socket_address(directory, "fake"), next_token=scripted(TOKENS), features=[features.CONSTRAINT]
    )
    async with running_schedulers(fake), running_router([fake.address], **{**PARSERS, **options}) as (server, stub):
        await server.wait_ready()
        yield server, stub, fake


def expected(text: str = OUTPUT) -> Parsed:
    return parse(text, "hermes", "qwen3")


async def test_chunks_carry_what_the_parser_makes_of_their_text(tmp_path: Path) -> None:
    async with router(tmp_path) as (_, stub, _):
        client = Client()
        await receive(stub.Generate(request()), into=client)
    assert client.text == {0: OUTPUT}
    assert client.parsed == expected()
    assert client.parsed.reasoning == "\nI look it up.\n"
    assert client.parsed.content == "\n\nLet me see.\n"
    assert len(client.parsed.calls) == 2
    assert client.finish[0] == pb.Finish(reason=pb.FINISH_REASON_STOP, has_tool_calls=True)
    # The marks may be special tokens.
    assert not client.started.sampling.skip_special_tokens


async def test_one_answer_has_them_whole(tmp_path: Path) -> None:
    async with router(tmp_path) as (_, stub, _):
        result = await stub.GenerateUnary(request(n=2))
    first, second = result.choices
    assert Parsed.of(first) == expected()
    assert (first.text, first.finish.has_tool_calls) == (OUTPUT, True)
    # Ids of choices differ, all else is the same.
    assert Parsed.of(second).named == Parsed.of(first).named
    assert {call.id for call in first.tool_calls}.isdisjoint(call.id for call in second.tool_calls)


async def test_a_resume_after_any_token_goes_on_exactly(tmp_path: Path) -> None:
    async with router(tmp_path) as (_, stub, fake):
        for num_tokens in range(1, len(TOKENS) + 1):
            fake.pause_at = num_tokens
            client = Client()
            call = stub.Generate(request())
            await receive(call, into=client, until=lambda r, n=num_tokens: len(r.token_ids.get(0, ())) == n)
            call.cancel()
            fake.pause_at = None
            resume = client.resume_request()
            client.begin_again()
            async with asyncio.timeout(30):
                await receive(stub.Generate(resume), into=client)
            assert client.parsed == expected(), num_tokens
            assert client.finish[0].has_tool_calls


@pytest.mark.parametrize("num_missing", [1, 20, 60, len(OUTPUT.encode())])
async def test_a_resume_whose_client_lacks_text_brings_its_deltas(tmp_path: Path, num_missing: int) -> None:
    kept = OUTPUT.encode()[: len(OUTPUT.encode()) - num_missing].decode(errors="ignore")
    async with router(tmp_path) as (_, stub, _):
        client = Client()
        await receive(stub.Generate(request()), into=client)
        resume = client.resume_request()
        (choice,) = resume.resume.choices
        choice.text_bytes_delivered, choice.finished = len(kept.encode()), False
        again = _Behind()
        await receive(stub.Generate(resume), into=again)
    whole, before = expected(), parse_prefix(kept)
    assert again.text[0] == OUTPUT[len(kept) :]
    assert before.add(again.deltas) == whole
    assert again.finish[0].has_tool_calls


async def test_a_long_resume_is_parsed_in_slices(tmp_path: Path) -> None:
    """Its tokens come in several slices, and the end of what the client has lies within one."""
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "' + "Zürich 🎉 \\n" * 500 + '"}}</tool_call>'
    tokens = smollm2_tokenizer().encode(text, add_special_tokens=False)
    assert 2048 < len(tokens) < 6000
    kept = text[:2500].encode()
    fake = FakeScheduler(
        socket_address(tmp_path, "fake"), model_info(max_model_len=8192), scripted(tokens), tokens_per_step=64
    )
    async with router(tmp_path, fake) as (_, stub, _):
        client = Client()
        await receive(stub.Generate(request(max_tokens=7000)), into=client)
        resume = client.resume_request()
        (choice,) = resume.resume.choices
        del choice.output_token_ids[-7:]
        choice.text_bytes_delivered, choice.finished = len(kept), False
        again = _Behind()
        await receive(stub.Generate(resume), into=again)
    assert client.parsed == expected(text)
    assert parse_prefix(kept.decode()).add(again.deltas) == client.parsed


class _Behind(Received):
    """The choice of a resume, whose first token is not 0."""

    def __init__(self) -> None:
        super().__init__()
        self.deltas: list[pb.Delta] = []

    def add(self, response: pb.GenerateResponse) -> None:
        if response.HasField("chunk"):
            self.token_ids.setdefault(0, [0] * response.chunk.first_token)
            self.deltas.extend(response.chunk.deltas)
        super().add(response)


def parse_prefix(text: str) -> Parsed:
    return Parsed().add(new_parser("hermes", "qwen3").push(text))


async def test_a_call_that_is_cut_off_is_none_for_finish_and_one_that_breaks_is_counted(tmp_path: Path) -> None:
    broken = smollm2_tokenizer().encode("<tool_call>no call</tool_call>", add_special_tokens=False)
    fake = FakeScheduler(socket_address(tmp_path, "fake"), next_token=scripted(broken))
    async with router(tmp_path, fake) as (server, stub, _):
        result = await stub.GenerateUnary(request())
        assert result.choices[0].content == "<tool_call>no call</tool_call>"
        assert not result.choices[0].finish.has_tool_calls
        assert server.metrics.registry.get_sample_value("octavo_malformed_tool_calls_total") == 1
        fake.next_token = scripted(TOKENS)
        result = await stub.GenerateUnary(request(max_tokens=len(TOKENS) - 5))
        assert len(result.choices[0].tool_calls) == 2
        assert result.choices[0].finish == pb.Finish(reason=pb.FINISH_REASON_LENGTH)


async def test_without_parse_output_nothing_is_parsed(tmp_path: Path) -> None:
    plain = request()
    plain.parse_output = False
    async with router(tmp_path) as (_, stub, _):
        client = Client()
        await receive(stub.Generate(plain), into=client)
    assert (client.text, client.parsed) == ({0: OUTPUT}, Parsed())
    assert client.started.sampling.skip_special_tokens
    assert client.finish[0] == pb.Finish(reason=pb.FINISH_REASON_STOP)


async def test_the_model_of_the_tests_has_no_format_so_its_output_is_content(tmp_path: Path) -> None:
    async with router(tmp_path, tool_call_parser="auto", reasoning_parser="auto") as (_, stub, _):
        result = await stub.GenerateUnary(request())
    assert Parsed.of(result.choices[0]) == Parsed(content=OUTPUT)


async def test_a_search_is_not_parsed(tmp_path: Path) -> None:
    search = request()
    search.beam_search.width = 2
    async with router(tmp_path) as (_, stub, _):
        with pytest.raises(grpc.aio.AioRpcError, match="parse_output and beam_search are set") as caught:
            await stub.GenerateUnary(search)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_the_script_ends() -> None:
    assert EOS not in TOKENS


async def test_a_resume_of_a_forced_call_brings_its_constraint(tmp_path: Path) -> None:
    """Its tools say what a call is; the constraint is the one that the first attempt began with."""
    forced = request()
    forced.chat.tool_choice = pb.TOOL_CHOICE_REQUIRED
    async with router(tmp_path) as (_, stub, fake):
        client, fake.pause_at = Client(), 40
        call = stub.Generate(forced)
        await receive(call, into=client, until=lambda r: len(r.token_ids.get(0, ())) == 40)
        call.cancel()
        fake.pause_at = None
        assert client.started.sampling.constraint.structural_tag
        resume = client.resume_request()
        resume.chat.tool_choice = pb.TOOL_CHOICE_REQUIRED
        client.begin_again()
        async with asyncio.timeout(30):
            await receive(stub.Generate(resume), into=client)
    assert client.parsed == expected()
    first, second = (submit.sampling.constraint for submit in fake.submitted)
    assert first == second
    assert first.after == "</think>"


async def test_a_budget_of_reasoning_needs_a_replica_that_knows_it(tmp_path: Path) -> None:
    """Its marks travel in Started and in resumes; usage counts the reasoning, also what a resume brings."""
    asked = request(thinking_token_budget=90)
    async with router(tmp_path) as (_, stub, _):
        with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.thinking_token_budget is set: no") as caught:
            await receive(stub.Generate(asked))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    fake = FakeScheduler(socket_address(tmp_path, "newer"), next_token=scripted(TOKENS), features=[THINKING_BUDGET])
    async with router(tmp_path, fake) as (_, stub, _):
        whole = Client()
        await receive(stub.Generate(asked), into=whole)
        num_reasoning = whole.finished.usage.reasoning_tokens
        assert 4 < num_reasoning < len(TOKENS)
        marks = whole.started.sampling.reasoning_marks
        assert smollm2_tokenizer().decode(marks.end_token_ids, skip_special_tokens=False) == "\n</think>\n\n"
        for length in (2, num_reasoning + 6):
            resume = whole.resume_request()
            resume.include_reasoning = False
            (choice,) = resume.resume.choices
            del choice.output_token_ids[length:]
            choice.text_bytes_delivered, choice.finished = 0, False
            resumed = Client()
            resumed.token_ids[0] = TOKENS[:length]
            await receive(stub.Generate(resume), into=resumed)
            assert resumed.started.sampling == whole.started.sampling
            assert resumed.finished.usage.reasoning_tokens == num_reasoning
            assert resumed.parsed.reasoning == ""
            assert resumed.parsed.content == whole.parsed.content
    assert [submit.sampling.reasoning_marks for submit in fake.submitted] == [marks] * 3
