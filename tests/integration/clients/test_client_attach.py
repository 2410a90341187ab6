"""Both clients attach to a stream that another client has begun, and survive the router that held it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from octavo import AsyncClient, Client, Delta, SamplingParams
from octavo.client import errors
from octavo.client.requests import generate_request
from octavo.client.results import Generation
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler
from tests.support.ports import free_port

SAMPLING = SamplingParams(max_tokens=12, seed=3, n=2)


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"), pause_at=3)
    async with running_schedulers(fake):
        yield fake


async def _begin(client: AsyncClient, request_id: str) -> None:
    """Reads the first delta, and leaves."""
    async with client.stream("Once upon", SAMPLING, request_id=request_id, detach_timeout=60) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                return


async def _rest(client: AsyncClient, request_id: str) -> Generation:
    async with client.attach(request_id) as stream:
        async for _ in stream:
            pass
        return stream.generation


async def test_another_client_reads_the_whole_stream(scheduler: FakeScheduler) -> None:
    async with running_router([scheduler.address]) as (server, _):
        await server.wait_ready()
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            await _begin(client, "a")
            scheduler.pause_at = None
            attached = await _rest(client, "a")
            whole = await client.generate("Once upon", SAMPLING)
            assert attached.choices == whole.choices
            assert attached.prompt_token_ids == whole.prompt_token_ids

            def synchronously() -> Generation:
                with Client(f"127.0.0.1:{server.port}") as other, other.attach("a") as stream:
                    for _ in stream:
                        pass
                    return stream.generation

            assert (await asyncio.to_thread(synchronously)).choices == whole.choices
            with pytest.raises(errors.RequestNotFound, match="'unknown'"):
                await _rest(client, "unknown")
            with pytest.raises(errors.InvalidRequest, match="detach_timeout=-1"):
                await client.generate("Once upon", SAMPLING, detach_timeout=-1)


async def test_a_reader_survives_the_router_that_held_its_stream(scheduler: FakeScheduler) -> None:
    """The other router does not hold it: the reader resumes with the tokens it has."""
    async with running_router([scheduler.address]) as (second, _):
        await second.wait_ready()
        async with running_router([scheduler.address]) as (first, _):
            await first.wait_ready()
            targets = [f"127.0.0.1:{first.port}", f"127.0.0.1:{second.port}"]
            async with AsyncClient(targets) as client:
                await _begin(client, "a")
                async with client.attach("a") as stream:
                    async for event in stream:
                        if isinstance(event, Delta):
                            await first.stop()
                            scheduler.pause_at = None
                            break
                    async for _ in stream:
                        pass
                    attached = stream.generation
                assert attached.num_resumes >= 1
                whole = await client.generate("Once upon", SAMPLING)
                assert [choice.token_ids for choice in attached.choices] == [each.token_ids for each in whole.choices]
                assert [choice.text for choice in attached.choices] == [choice.text for choice in whole.choices]


async def test_a_call_that_broke_before_its_first_message_is_found_again(scheduler: FakeScheduler) -> None:
    """The request lives without a reader, so calling again is refused: the client attaches to its own request."""
    async with running_router([scheduler.address]) as (server, stub):
        await server.wait_ready()
        # A target that nobody listens on: its failure is that of the broken call.
        async with AsyncClient([f"127.0.0.1:{free_port()}", f"127.0.0.1:{server.port}"]) as client:
            call = stub.Generate(generate_request("Once upon", SAMPLING, {"request_id": "b", "detach_timeout": 60}))
            await call.read()
            call.cancel()
            async with client.stream("Once upon", SAMPLING, request_id="b", detach_timeout=60) as stream:
                async for event in stream:
                    if isinstance(event, Delta):
                        scheduler.pause_at = None
                found = stream.generation
            whole = await client.generate("Once upon", SAMPLING)
            assert [choice.token_ids for choice in found.choices] == [choice.token_ids for choice in whole.choices]
