"""Files and batches, called by OpenAI's client: states, tenants, bounds, and what a restart leaves to do."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from router.api.gateway.app import Gateway
from router.api.gateway.batches import runner
from router.api.gateway.batches.store import BatchStore
from router.api.gateway.reading import bodies
from router.api.gateway.server import GatewayServer
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler
from tests.support.batch_lines import COMPLETIONS, HOST, LINES, line

MINE, OTHERS = "mine-0123456789abcdef", "others-0123456789abcdef"


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake):
        yield fake


@asynccontextmanager
async def serving(
    scheduler: FakeScheduler, folder: Path, *, max_bytes: int = 2**30, has_keys: bool = False, **options: Any
) -> AsyncIterator[str]:
    if has_keys:
        file = folder / "keys.yaml"
        file.write_text(f"keys:\n- {{name: mine, key: {MINE}}}\n- {{name: others, key: {OTHERS}}}\n")
        file.chmod(0o600)
        options["api_keys_file"] = str(file)
    async with running_router([scheduler.address], **options) as (server, _):
        await server.wait_ready()
        gateway = Gateway(
            server.intake,
            server.registry,
            server.readiness,
            max_body_bytes=200_000,
            keys=server.keys,
            batches=BatchStore(folder / "batches", max_bytes),
        )
        http = GatewayServer(gateway, HOST, 0)
        http.start()
        try:
            yield f"http://{HOST}:{http.port}/v1"
        finally:
            await http.stop()


def client(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


async def send(api: openai.AsyncOpenAI, *lines: str, endpoint: Any = COMPLETIONS, **fields: Any) -> Batch:
    file = await api.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return await api.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


async def ended(api: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(30):
        while True:
            batch = await api.batches.retrieve(batch.id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.05)


async def output(api: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a file, in the order of the input."""
    if file_id is None:
        return []
    text = (await api.files.content(file_id)).text
    found = [json.loads(each) for each in text.splitlines()]
    return sorted(found, key=lambda each: int(each["id"].rpartition("_")[2]))


async def test_a_batch_with_bad_lines_is_computed_and_its_files_are_there(
    tmp_path: Path, scheduler: FakeScheduler
) -> None:
    async with serving(scheduler, tmp_path) as url, client(url) as api:
        batch = await send(api, *(text for text, _ in LINES), metadata={"k": "v"})
        assert (batch.status, batch.metadata, batch.output_file_id) == ("validating", {"k": "v"}, None)
        batch = await ended(api, batch)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        # Chats are lines of another endpoint here.
        assert batch.request_counts.model_dump() == {"total": 17, "completed": 2, "failed": 15}
        assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at, batch.expires_at)
        answers, problems = await output(api, batch.output_file_id), await output(api, batch.error_file_id)
        assert [each["custom_id"] for each in answers] == ["a", "last"]
        assert answers[0]["response"]["body"]["usage"]["completion_tokens"] == 5
        assert [each["response"]["status_code"] for each in problems if each["response"]] == [400, 404]
        numbers = [int(each["id"].rpartition("_")[2]) for each in answers + problems]
        assert sorted(numbers) == [number for number, (_, outcome) in enumerate(LINES, 1) if outcome]
        told = await api.files.retrieve(batch.output_file_id or "")
        assert (told.purpose, told.filename, told.status) == ("batch_output", f"{batch.id}_output.jsonl", "processed")
        assert [each.id async for each in api.batches.list()] == [batch.id]
        assert len([each async for each in api.files.list()]) == 3
        assert (await api.files.delete(batch.input_file_id)).deleted
        with pytest.raises(openai.NotFoundError, match="is not stored here"):
            await api.files.content(batch.input_file_id)
        with pytest.raises(openai.ConflictError, match="the batch is completed"):
            await api.batches.cancel(batch.id)
        # Nothing but the record is left of the batch, besides its files.
        assert [path.name for path in (tmp_path / "batches").glob("*/batches/*/*")] == ["record.json"]
        assert not [*(tmp_path / "batches" / "queue").iterdir()]


async def test_lines_are_behind_live_requests_and_belong_to_the_tenant(
    tmp_path: Path, scheduler: FakeScheduler
) -> None:
    async with (
        serving(scheduler, tmp_path, has_keys=True) as url,
        client(url, MINE) as mine,
        client(url, OTHERS) as others,
    ):
        batch = await ended(mine, await send(mine, line("a", priority=-5)))
        assert batch.status == "completed"
        assert {(each.tenant, each.priority) for each in scheduler.submitted} == {("mine", 2**31 - 1)}
        assert [each async for each in others.batches.list()] == []
        assert [each async for each in others.files.list()] == []
        for call in (
            others.batches.retrieve(batch.id),
            others.batches.cancel(batch.id),
            others.files.retrieve(batch.input_file_id),
            others.files.content(batch.output_file_id or ""),
            others.files.delete(batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.BadRequestError, match="is not a file of yours"):
            await others.batches.create(
                input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
            )


async def test_a_batch_goes_on_in_another_process_and_computes_no_line_again(
    tmp_path: Path, scheduler: FakeScheduler
) -> None:
    scheduler.step_seconds = 0.02
    lines = [line(str(i)) for i in range(100)]
    async with serving(scheduler, tmp_path) as url, client(url) as api:
        batch = await send(api, *lines)
        await scheduler.wait_until(lambda fake: len(fake.submitted) >= 50)
        scheduler.pause_at = 3
        # A second process looks for batches meanwhile, and leaves this one alone.
        async with serving(scheduler, tmp_path) as second, client(second) as other:
            shown = await other.batches.retrieve(batch.id)
            assert shown.status == "in_progress"
            await asyncio.sleep(0.1)
        num_before = len(scheduler.submitted)
    assert num_before < 100
    scheduler.pause_at = None
    async with serving(scheduler, tmp_path) as url, client(url) as api:
        batch = await ended(api, batch)
        found = await output(api, batch.output_file_id)
    assert [each["custom_id"] for each in found] == [str(i) for i in range(100)]
    # Those that were being computed when the first process stopped had no answer.
    assert len(scheduler.submitted) <= 100 + 32


async def test_a_cancelled_batch_keeps_what_it_has(tmp_path: Path, scheduler: FakeScheduler) -> None:
    scheduler.pause_at = 3
    async with serving(scheduler, tmp_path) as url, client(url) as api:
        batch = await send(api, "{", *(line(str(i)) for i in range(50)))
        await scheduler.wait_until(lambda fake: len(fake.submitted) >= 20)
        batch = await api.batches.cancel(batch.id)
        assert batch.status == "cancelling"
        assert batch.cancelling_at is not None
        batch = await ended(api, batch)
        assert (batch.status, batch.output_file_id) == ("cancelled", None)
        assert [each["error"]["code"] for each in await output(api, batch.error_file_id)] == ["invalid_json_line"]
        metrics = (await api.get("/../metrics", cast_to=httpx.Response)).text
        assert 'octavo_batches_ended_total{status="cancelled"} 1.0' in metrics
        assert 'octavo_batch_lines_total{outcome="error"} 1.0' in metrics
        assert 'outcome="success"' not in metrics
        await scheduler.wait_until(lambda fake: fake.num_live == 0)


async def test_what_is_not_computed_in_time_is_told_line_by_line(
    tmp_path: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.pause_at = 3
    monkeypatch.setattr("router.api.gateway.batches.endpoints._DAY_S", 1)
    async with serving(scheduler, tmp_path) as url, client(url) as api:
        batch = await ended(api, await send(api, line("short", max_tokens=2), *(line(str(i)) for i in range(40))))
        assert batch.status == "expired"
        assert len(await output(api, batch.output_file_id)) == 1
        problems = await output(api, batch.error_file_id)
        assert [each["custom_id"] for each in problems] == [str(i) for i in range(40)]
        assert {each["error"]["code"] for each in problems} == {"batch_expired"}


async def test_files_are_bounded_and_checked(
    tmp_path: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_LINES", 3)
    async with serving(scheduler, tmp_path, max_bytes=2**20, has_keys=True) as url, client(url, MINE) as api:
        assert (await ended(api, await send(api, *map(str, range(4))))).errors is not None
        batch = await ended(api, await send(api, "\n"))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert "has 0 lines: use 1 to 3" in (batch.errors.data[0].message or "")
        file = await api.files.create(file=("half", b"x" * 2**18), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="max_files_bytes=1048576") as refused:
            await api.files.create(file=("more", b"x" * 2**19), purpose="batch")
        assert refused.value.status_code == 413
        await api.files.delete(file.id)
        with pytest.raises(openai.BadRequestError, match="purpose='evals': use 'batch'"):
            await api.files.create(file=("x", b"x"), purpose="evals")
    # Nothing is left of what was refused.
    assert not [*(tmp_path / "batches").glob("*/files/.part-*")]


_FORM = "multipart/form-data; boundary=b"
BAD_UPLOADS = (
    (b"--b\r\n", _FORM, "ends before its last boundary"),
    (b"hello", _FORM, "is not multipart/form-data"),
    (b"{}", "application/json", "send the file as multipart/form-data"),
    (b"", "multipart/form-data", "send the file as multipart/form-data"),
    (b"--b--\r\n", _FORM, "purpose=''"),
    (b"x", "multipart/form-data; boundary=" + "b" * 5000, "is not multipart/form-data"),
    (b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n', _FORM, "file is missing"),
)


async def test_bad_uploads_are_refused(tmp_path: Path, scheduler: FakeScheduler) -> None:
    async with serving(scheduler, tmp_path) as url, httpx.AsyncClient() as http:
        for content, kind, words in BAD_UPLOADS:
            answer = await http.post(f"{url}/files", content=content, headers={"content-type": kind})
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]
    assert not [*(tmp_path / "batches").glob("*/files/*")]


async def test_an_upload_that_stalls_ends(
    tmp_path: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.3)

    async def slowly() -> AsyncIterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 100_000
        await asyncio.sleep(0.6)
        yield b"\r\n--b--\r\n"

    async with serving(scheduler, tmp_path) as url, httpx.AsyncClient() as http:
        kind = {"content-type": "multipart/form-data; boundary=b"}
        answer = await http.post(f"{url}/files", content=slowly(), headers=kind)
        assert answer.status_code == 408
    assert not [*(tmp_path / "batches").glob("*/files/*")]


async def test_a_large_file_is_never_held(tmp_path: Path, scheduler: FakeScheduler) -> None:
    async with serving(scheduler, tmp_path) as url, client(url) as api:
        content = b"x" * 20_000_000 + b"\n" + line("a").encode()
        file = await api.files.create(file=("large", content), purpose="batch")
        assert file.bytes == len(content)
        assert (await api.files.content(file.id)).content == content
        batch = await api.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        batch = await ended(api, batch)
        assert [each["error"]["code"] for each in await output(api, batch.error_file_id)] == ["line_too_long"]
        assert len(await output(api, batch.output_file_id)) == 1


async def test_lists_come_in_pages(tmp_path: Path, scheduler: FakeScheduler) -> None:
    async with serving(scheduler, tmp_path) as url, client(url) as api:
        made = [(await api.files.create(file=("x", b"x"), purpose="batch")).id for _ in range(5)]
        assert sorted([each.id async for each in api.files.list(limit=2)]) == sorted(made)
        for fields, words in (({"limit": 0}, "limit='0': use 1 to"), ({"after": "x"}, "after='x' is not in the list")):
            with pytest.raises(openai.BadRequestError, match=words):
                await api.files.list(**fields)  # type: ignore[arg-type]


async def test_without_a_directory_the_option_is_named(tmp_path: Path, scheduler: FakeScheduler) -> None:
    async with running_router([scheduler.address]) as (server, _):
        gateway = Gateway(server.intake, server.registry, server.readiness, max_body_bytes=200_000)
        http = GatewayServer(gateway, HOST, 0)
        http.start()
        async with client(f"http://{HOST}:{http.port}/v1") as api:
            with pytest.raises(openai.NotFoundError, match="the option batches_dir"):
                await api.files.create(file=("x", b"x"), purpose="batch")
            with pytest.raises(openai.NotFoundError, match="the option batches_dir"):
                await api.batches.list()
        await http.stop()
