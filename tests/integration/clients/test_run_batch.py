"""`octavo run-batch` against the router's HTTP API: bad lines, a kill -9 of the command, a server that goes away."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.batch import BatchError, Job, compute
from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler
from tests.support.batch_lines import HOST, LINES, line
from tests.support.models.tiny_model import make_tiny_model
from tests.support.ports import free_port
from tests.support.up import COMMAND, environment


@asynccontextmanager
async def serving(scheduler: FakeScheduler, port: int = 0) -> AsyncIterator[str]:
    async with running_router([scheduler.address]) as (server, _):
        await server.wait_ready()
        gateway = Gateway(server.intake, server.metrics.registry, server.readiness, max_body_bytes=200_000)
        http = GatewayServer(gateway, HOST, port)
        http.start()
        try:
            yield f"http://{HOST}:{http.port}"
        finally:
            await http.stop()


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake):
        yield fake


async def start(folder: Path, url: str, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *COMMAND,
        "run-batch",
        "-i",
        str(folder / "in.jsonl"),
        "-o",
        str(folder / "out.jsonl"),
        "--url",
        url,
        *flags,
        env=environment(),
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
    )


async def run(folder: Path, url: str, *flags: str) -> tuple[int, str]:
    process = await start(folder, url, *flags)
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, said.decode()


def write(folder: Path, lines: Sequence[str]) -> None:
    (folder / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")


def read(folder: Path) -> list[dict[str, Any]]:
    """The output, in the order of the input."""
    text = (folder / "out.jsonl").read_text()
    assert text.endswith("\n")
    found = [json.loads(each) for each in text.splitlines()]
    return sorted(found, key=lambda each: int(each["id"].rpartition("_")[2]))


async def test_each_line_gets_its_answer_or_an_error_that_names_what_is_wrong(
    tmp_path: Path, scheduler: FakeScheduler
) -> None:
    write(tmp_path, [text for text, _ in LINES])
    async with serving(scheduler) as url:
        code, said = await run(tmp_path, url)
        assert code == 0, said
        assert "17 lines: 4 answers, 13 errors" in said
        found, num_submitted = read(tmp_path), len(scheduler.submitted)
        expected = [(number, outcome) for number, (_, outcome) in enumerate(LINES, 1) if outcome]
        assert [int(each["id"].rpartition("_")[2]) for each in found] == [number for number, _ in expected]
        for each, (number, outcome) in zip(found, expected, strict=True):
            assert set(each) == {"id", "custom_id", "response", "error"}
            if isinstance(outcome, str):
                assert (each["error"]["code"], each["error"]["line"], each["response"]) == (outcome, number, None)
            else:
                assert (each["response"]["status_code"], each["response"]["request_id"]) == (outcome, each["id"])
                assert each["error"] is None
        assert found[0]["custom_id"] == "a"
        assert found[0]["response"]["body"]["usage"]["completion_tokens"] == 5
        assert "temperature=-1" in found[7]["response"]["body"]["error"]["message"]
        # The same command again: nothing is left to do.
        assert (await run(tmp_path, url))[0] == 0
        assert len(scheduler.submitted) == num_submitted == 4
        # Another input may not take its place.
        write(tmp_path, [line("other")])
        code, said = await run(tmp_path, url)
        assert code == 1
        assert "is not the output of this batch" in said


async def test_a_killed_command_goes_on_and_computes_no_line_again(tmp_path: Path, scheduler: FakeScheduler) -> None:
    scheduler.step_seconds = 0.01
    write(tmp_path, [line(str(i), max_tokens=6) for i in range(40)])
    part = tmp_path / "out.jsonl.part"
    async with serving(scheduler) as url:
        process = await start(tmp_path, url, "--concurrency=4")
        async with asyncio.timeout(120):
            while not part.exists() or part.read_bytes().count(b"\n") < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        await asyncio.wait_for(process.wait(), 60)
        assert not (tmp_path / "out.jsonl").exists()
        num_kept = part.read_bytes().count(b"\n")
        with part.open("ab") as file:
            # As a kill in the middle of a write leaves it.
            file.write(part.read_bytes().splitlines()[0][:50])
        code, said = await run(tmp_path, url, "--concurrency=4")
        assert code == 0, said
        assert f"{num_kept} of them kept from before" in said
    assert [each["custom_id"] for each in read(tmp_path)] == [str(i) for i in range(40)]
    # Lines that were being computed when it was killed had not been answered.
    assert len(scheduler.submitted) <= 40 + 4
    assert not part.exists()


async def test_a_server_that_is_away_for_a_while_costs_no_line(tmp_path: Path, scheduler: FakeScheduler) -> None:
    write(tmp_path, [line(str(i)) for i in range(8)])
    port = free_port()
    waiting = asyncio.create_task(run(tmp_path, f"http://{HOST}:{port}"))
    await asyncio.sleep(0.8)
    async with serving(scheduler, port):
        code, said = await waiting
    assert code == 0, said
    assert [each["response"]["status_code"] for each in read(tmp_path)] == [200] * 8


async def test_without_a_server_it_ends_and_says_how_to_go_on(tmp_path: Path) -> None:
    write(tmp_path, [line("a")])
    code, said = await run(tmp_path, f"http://{HOST}:{free_port()}", "--retry-for=0.3")
    assert code == 1
    assert "ConnectError" in said
    assert "0 of 1 lines are kept" in said
    with pytest.raises(BatchError, match="use http://HOST:PORT"):
        await compute(Job(input=tmp_path / "in.jsonl", output=tmp_path / "out.jsonl"), "localhost:8000", "")


async def test_it_starts_and_ends_a_cluster_of_its_own(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    write(tmp_path, [line(str(i), prompt="w3 w4") for i in range(3)])
    flags = (f"--model={model}", "--load-format=dummy", "--dtype=float32", "--kv-cache-memory=0.01")
    code, said = await run(tmp_path, "", *flags)
    assert code == 0, said
    assert "3 lines: 3 answers" in said
    assert [each["custom_id"] for each in read(tmp_path)] == ["0", "1", "2"]
