"""Octavo's own clients with images: through routers of fake schedulers, and on to another router."""

import asyncio
from pathlib import Path

import grpc
import pytest

from octavo import AsyncClient, Client, Delta, SamplingParams
from octavo.client.errors import InvalidRequest
from protos import inference_pb2 as pb
from tests.fakes.media import IMAGE_TOKEN, image_file, media_scheduler, media_tokenizer
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.support.up import COMMAND

FILE = image_file(56, 84)
SAMPLING = SamplingParams(max_tokens=8, seed=3)
QUESTION = [{"role": "user", "content": [{"type": "image", "image": FILE}, {"type": "text", "text": "What is it?"}]}]


async def test_a_stream_goes_on_at_another_router_which_asks_for_the_image(tmp_path: Path) -> None:
    """The client brings the files only there, and only because that router has not got them."""
    fake = media_scheduler(socket_address(tmp_path, "one"), pause_at=3)
    router = running_router([fake.address], tokenizer=media_tokenizer())
    other_router = running_router([fake.address], tokenizer=media_tokenizer())
    async with running_schedulers(fake), router as (first, _), other_router as (second, _):
        await first.wait_ready()
        await second.wait_ready()
        targets = [f"127.0.0.1:{server.port}" for server in (first, second)]
        sent: list[pb.GenerateRequest] = []
        async with AsyncClient(targets) as client:
            _note_calls(client, sent)
            stream = client.stream(QUESTION, SAMPLING)
            stopping: asyncio.Task[None] | None = None
            async for event in stream:
                if isinstance(event, Delta) and stopping is None:
                    stopping = asyncio.create_task(first.stop())
                    fake.pause_at = None
            assert stopping is not None
            await stopping
            interrupted = stream.generation
            whole = await client.chat(QUESTION, SAMPLING)
    assert interrupted.num_resumes >= 2
    assert interrupted.choices[0].token_ids == whole.choices[0].token_ids
    assert interrupted.prompt_token_ids.count(IMAGE_TOKEN) == 6
    resumes = [request for request in sent if request.HasField("resume")]
    assert [len(request.items) for request in resumes][-2:] == [0, 1]
    assert all(len(request.resume.items) == 1 and not request.HasField("input") for request in resumes)


def _note_calls(client: AsyncClient, sent: list[pb.GenerateRequest]) -> None:
    stub = client.stub

    class Noting:
        def __init__(self, target: str) -> None:
            self._stub = stub(target)

        def Generate(self, request: pb.GenerateRequest, **arguments: object) -> object:
            noted = pb.GenerateRequest()
            noted.CopyFrom(request)
            sent.append(noted)
            return self._stub.Generate(request, **arguments)

    client.stub = Noting  # type: ignore[method-assign]


async def test_all_forms_of_prompts(tmp_path: Path) -> None:
    fake = media_scheduler(socket_address(tmp_path, "one"))
    path = tmp_path / "image.png"
    path.write_bytes(FILE)
    async with running_schedulers(fake), running_router([fake.address], tokenizer=media_tokenizer()) as (server, _):
        await server.wait_ready()
        target = f"127.0.0.1:{server.port}"

        def ask() -> list[tuple[int, ...]]:
            with Client(target) as client:
                asked = [
                    client.generate({"prompt": "a <filename> b", "multi_modal_data": {"image": path}}, SAMPLING),
                    client.generate("a <filename> b", SAMPLING, items=[str(path)]),
                    client.chat(QUESTION, SAMPLING),
                    client.chat(QUESTION, SAMPLING, mm_processor_kwargs={"max_pixels": 56 * 56}),
                ]
                with pytest.raises(InvalidRequest, match=r"items\[0\].image: the data is of an unknown format"):
                    client.generate("<filename>", SAMPLING, items=[b"no image"])
                return [each.prompt_token_ids for each in asked]

        prompts = await asyncio.to_thread(ask)
    assert prompts[0] == prompts[1]
    assert [prompt.count(IMAGE_TOKEN) for prompt in prompts] == [6, 6, 6, 2]


async def test_octavo_chat_with_an_image(tmp_path: Path) -> None:
    fake = media_scheduler(socket_address(tmp_path, "one"))
    path = tmp_path / "image.png"
    path.write_bytes(FILE)
    async with running_schedulers(fake), running_router([fake.address], tokenizer=media_tokenizer()) as (server, _):
        await server.wait_ready()
        command = [*COMMAND, "chat", "What is it?", "--target", f"127.0.0.1:{server.port}"]
        command += ["--max-tokens", "4", "--seed", "3"]
        process = await asyncio.create_subprocess_exec(
            *command,
            "--image",
            str(path),
            "--image",
            str(path),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        _, err = await process.communicate()
        assert process.returncode == 0, err
        assert b"4 output tokens" in err
        wrong = await asyncio.create_subprocess_exec(
            *command, "--image", "/no/such/file", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        _, err = await wrong.communicate()
        assert wrong.returncode == 2
        assert b"/no/such/file" in err
    (submit,) = fake.submitted
    assert len(submit.items) == 2
    assert fake.prompts[submit.group].count(IMAGE_TOKEN) == 12


def test_a_refusal_for_want_of_items_is_not_repeated_forever() -> None:
    """A client that has none to bring gets the error."""
    from octavo.client.assembly import Assembly
    from octavo.client.errors import ItemsNeeded
    from octavo.client.retry import Deadline, RetryBudget, RetryPolicy, Targets

    assembly = Assembly(pb.GenerateRequest(prompt="a"))
    policy = RetryPolicy(Targets("a"), Deadline(None), 60.0, RetryBudget(), assembly)
    error = ItemsNeeded("bring them", code=grpc.StatusCode.FAILED_PRECONDITION)
    assert not policy._is_worth_retrying(error)
    assembly = Assembly(pb.GenerateRequest(prompt="a", items=[pb.Item(image=pb.Image(data=FILE))]))
    policy = RetryPolicy(Targets("a"), Deadline(None), 60.0, RetryBudget(), assembly)
    assembly.accept(pb.GenerateResponse(started=pb.Started(request_id="r")))
    assembly.next_call()
    assert policy._is_worth_retrying(error)
    assert len(assembly.next_call().items) == 1
    assert not policy._is_worth_retrying(error)
