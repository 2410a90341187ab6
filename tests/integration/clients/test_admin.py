"""Explain, ResetPrefixCache and cache events of a scheduler process: directly, through a router and by commands."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from configs.options import Options
from protos import admin_pb2 as pb
from protos import inference_pb2, scheduler_pb2
from protos.admin_pb2_grpc import AdminStub
from runtime.block_hashes import hash_prompt_blocks, scope_of
from tests.fakes.hash_runner import BAD_TOKEN, HashModel
from tests.fakes.routers import running_router
from tests.fakes.worker import FakeWorker
from tests.support.scheduler.cache_view import CacheView
from tests.support.scheduler.scheduler_process import scheduler_process
from tests.support.scheduler.scheduling import RouterEnd, make_options, running_worker
from tests.support.up import COMMAND, environment

PROMPT = list(range(20, 60))
# The router uses SmolLM2's tokenizer.
MODEL = HashModel(vocab_size=49_152)


@contextlib.asynccontextmanager
async def serving(directory: Path, **changes: object) -> AsyncIterator[tuple[Options, FakeWorker]]:
    """A scheduler process with a worker."""
    options = make_options(directory, served_model_name="test-model", **changes)
    with scheduler_process(options):
        async with running_worker(options, model=MODEL) as worker:
            yield options, worker


@contextlib.asynccontextmanager
async def admin_of(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield AdminStub(channel)


async def octavo(*arguments: str) -> subprocess.CompletedProcess[str]:
    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments], env=environment(), capture_output=True, text=True, check=False, timeout=120
        )

    return await asyncio.to_thread(run)


def moments(timeline: pb.RequestTimeline) -> list[tuple[str, int]]:
    return [(entry.moment, entry.num_tokens) for entry in timeline.entries]


async def test_a_request_is_explained_while_it_lives_and_afterwards(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as (options, _),
        RouterEnd(options.scheduler_address(0)) as router,
        admin_of(options.scheduler_address(0)) as admin,
    ):
        group = await router.submit(PROMPT * 3, max_tokens=200, request_id="mine")
        await router.wait_for(lambda: router.tokens[group, 0])
        (live,) = (await admin.Explain(pb.ExplainRequest(request_id="mine"))).timelines
        assert (live.request_id, live.replica_id, live.finished) == ("mine", "0", False)
        await router.finish(group)
        (timeline,) = (await admin.Explain(pb.ExplainRequest(request_id="mine"))).timelines
        assert timeline.finished
        assert moments(timeline) == [
            ("queued", 120),
            ("admitted", 0),
            ("chunked", 64),
            ("scheduled", 56),
            ("decoding", 0),
            ("finished", 200),
        ]
        assert timeline.entries[-1].reason == "length"
        assert [entry.step for entry in timeline.entries] == [0, 1, 1, 2, 2, 0]
        times = [entry.time for entry in timeline.entries]
        assert times[0] == 0.0
        assert times == sorted(times)
        assert times[-1] <= timeline.now
        # The same prompt again, partly from the prefix cache.
        await router.finish(await router.submit(PROMPT * 3, max_tokens=1, request_id="mine"))
        again = (await admin.Explain(pb.ExplainRequest(request_id="mine"))).timelines
        assert [moments(each)[:2] for each in again] == [
            [("queued", 120), ("admitted", 0)],
            [("queued", 120), ("admitted", 112)],
        ]


async def test_a_preemption_is_explained(tmp_path: Path) -> None:
    # Room for one request at its full length, but not for both.
    async with (
        serving(tmp_path, num_blocks_override=16) as (options, _),
        RouterEnd(options.scheduler_address(0)) as router,
        admin_of(options.scheduler_address(0)) as admin,
    ):
        groups = [await router.submit([20 + i] * 40, max_tokens=60, request_id=f"r{i}") for i in range(2)]
        for group in groups:
            await router.finish(group)
        (timeline,) = (await admin.Explain(pb.ExplainRequest(request_id="r1"))).timelines
        entries = {entry.moment: entry for entry in timeline.entries}
        names = [entry.moment for entry in timeline.entries]
        assert entries["preempted"].reason == "no_blocks"
        assert entries["preempted"].num_tokens >= 40
        assert names.index("preempted") < names.index("resumed") < len(names) - 1
        assert moments(timeline)[-1] == ("finished", 60)


async def test_lost_workers_are_explained(tmp_path: Path) -> None:
    options = make_options(tmp_path)
    with scheduler_process(options):
        async with RouterEnd(options.scheduler_address(0)) as router, admin_of(options.scheduler_address(0)) as admin:
            async with running_worker(options):
                group = await router.submit(PROMPT, max_tokens=400, request_id="mine")
                await router.wait_for(lambda: router.tokens[group, 0])
            await router.wait_for(lambda: not router.loads[-1].workers_ready)
            (timeline,) = (await admin.Explain(pb.ExplainRequest(request_id="mine"))).timelines
            assert (timeline.entries[-1].moment, timeline.entries[-1].reason) == ("preempted", "workers_lost")
            async with running_worker(options):
                await router.finish(group)
            (timeline,) = (await admin.Explain(pb.ExplainRequest(request_id="mine"))).timelines
            assert [entry.moment for entry in timeline.entries][-4:] == ["resumed", "scheduled", "decoding", "finished"]


async def test_ends_say_why(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as (options, _),
        admin_of(options.scheduler_address(0)) as admin,
        RouterEnd(options.scheduler_address(0)) as router,
    ):

        async def reason(request_id: str) -> str:
            answer = await admin.Explain(pb.ExplainRequest(request_id=request_id))
            return answer.timelines[0].entries[-1].reason

        group = await router.submit(PROMPT, max_tokens=400, request_id="stopped")
        await router.cancel(group, reason=scheduler_pb2.CANCEL_REASON_STOP)
        await router.finish(group)
        assert await reason("stopped") == "cancelled: a stop string was found"
        await router.finish(await router.submit(PROMPT, max_tokens=400, request_id="late", deadline=0.001))
        assert await reason("late") == "cancelled: its deadline passed"
        old = await router.submit(PROMPT, max_tokens=400, request_id="twice")
        new = await router.submit(PROMPT, max_tokens=1, request_id="twice", attempt=1)
        await router.finish(old)
        await router.finish(new)
        assert await reason("twice") == "cancelled: a higher attempt took over"
        await router.finish(await router.submit([BAD_TOKEN], request_id="bad"))
        assert await reason("bad") == "error: the model's logits were not finite"
        async with RouterEnd(options.scheduler_address(0)) as other:
            group = await other.submit(PROMPT, max_tokens=470, request_id="lost")
            await other.wait_for(lambda: other.tokens[group, 0])
        await router.wait_idle()
        assert await reason("lost") == "cancelled: its router's Session ended"


async def test_questions_that_have_no_answer(tmp_path: Path) -> None:
    options = make_options(tmp_path)
    with scheduler_process(options):
        async with grpc.aio.insecure_channel(options.scheduler_address(0)) as channel:
            stub: Any = AdminStub(channel)
            # No worker has joined yet.
            with pytest.raises(grpc.aio.AioRpcError, match="replica 0 does not know it") as caught:
                await stub.Explain(pb.ExplainRequest(request_id="a"), wait_for_ready=True)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert (await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())).num_blocks == 0
            with pytest.raises(grpc.aio.AioRpcError, match="request_id is empty") as caught:
                await stub.Explain(pb.ExplainRequest())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
            call = reflection.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            names = {service.name for service in (await call.read()).list_services_response.service}
            assert {"octavo.v1.Scheduler", "octavo.v1.Admin"} <= names
            call.cancel()


async def test_what_was_cached_before_a_reset_is_not_found_after_it(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as (options, _),
        RouterEnd(options.scheduler_address(0)) as router,
        admin_of(options.scheduler_address(0)) as admin,
    ):

        async def num_cached() -> int:
            return (await router.finish(await router.submit(PROMPT, max_tokens=1))).num_cached_tokens

        assert [await num_cached(), await num_cached()] == [0, 32]
        # Blocks of a running request are no longer found, and it continues.
        running = await router.submit(PROMPT, max_tokens=300)
        await router.wait_for(lambda: router.tokens[running, 0])
        assert (await admin.ResetPrefixCache(pb.ResetPrefixCacheRequest())).num_blocks >= 5
        assert [await num_cached(), await num_cached()] == [0, 32]
        await router.finish(running)
        assert router.tokens[running, 0] == MODEL.generate(PROMPT, 300)


# --- Cache events


class Watcher:
    """A router's end with a view of the cache."""

    def __init__(self, router: RouterEnd, num_blocks: int) -> None:
        self.router, self.view = router, CacheView(8, num_blocks)

    def _catch_up(self) -> None:
        events, self.router.cache_events = self.router.cache_events, []
        self.view.apply(events)

    async def wait_for(self, condition: Callable[[CacheView], bool]) -> None:
        def holds() -> bool:
            self._catch_up()
            return condition(self.view)

        await self.router.wait_for(holds)

    def num_cached_tokens(self, prompt: list[int]) -> int:
        """Tokens that a request with this prompt would find cached; at least one token is left to compute."""
        self._catch_up()
        return self.view.num_cached_tokens(hash_prompt_blocks(prompt, 8, scope_of(""))[: (len(prompt) - 1) // 8])


async def test_a_watching_router_knows_what_a_prompt_would_find(tmp_path: Path) -> None:
    """The cache is small: prompts with common prefixes evict each other's blocks."""
    prompts = [[20 + i % 3] * 24 + [40 + i] * 20 for i in range(12)]
    async with (
        serving(tmp_path, num_blocks_override=20) as (options, _),
        RouterEnd(options.scheduler_address(0), watch_cache=True) as watching,
        RouterEnd(options.scheduler_address(0)) as other,
    ):
        await watching.wait_for(lambda: watching.cache_events)
        assert watching.cache_events[0].WhichOneof("event") == "cleared"
        watcher, hits = Watcher(watching, 20), []
        for prompt in [*prompts, *prompts[-3:], *prompts[:3]]:
            # Within a Session, cache events of earlier steps come before a finish.
            expected = watcher.num_cached_tokens(prompt)
            hits.append((await watching.finish(await watching.submit(prompt, max_tokens=1))).num_cached_tokens)
            assert hits[-1] == expected
        assert {0, 24, 40} <= set(hits)
        assert not other.cache_events


async def test_watchers_that_join_later_and_a_new_epoch(tmp_path: Path) -> None:
    options = make_options(tmp_path)
    names = hash_prompt_blocks(PROMPT, 8, scope_of(""))
    with scheduler_process(options):
        async with RouterEnd(options.scheduler_address(0), watch_cache=True) as first:
            async with running_worker(options):
                await first.finish(await first.submit(PROMPT, max_tokens=1))
                early = Watcher(first, 128)
                await early.wait_for(lambda view: view.num_cached_tokens(names) == 40)
                async with RouterEnd(options.scheduler_address(0), watch_cache=True) as second:
                    late = Watcher(second, 128)
                    await late.wait_for(lambda view: view.num_cached_tokens(names) == 40)
                # The first watcher gets no event twice.
                await first.finish(await first.submit([1, 2, 3], max_tokens=1))
                assert not first.cache_events
            await early.wait_for(lambda view: len(view) == 0)


# --- Through a router, and by commands


async def _until_serving(target: str) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="octavo.v1.Inference")
        async for answer in stub.Watch(request, wait_for_ready=True):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return


async def test_commands_explain_and_reset_through_a_router(tmp_path: Path) -> None:
    async with serving(tmp_path, max_num_batched_tokens=16) as (options, _):
        gone = f"unix:{tmp_path}/gone.sock"
        async with running_router([options.scheduler_address(0), gone]) as (server, stub):
            target = f"127.0.0.1:{server.port}"
            sampling = inference_pb2.SamplingParams(max_tokens=5, temperature=0)
            request = inference_pb2.GenerateRequest(request_id="first", sampling=sampling)
            request.token_ids.ids.extend(PROMPT)
            await _until_serving(target)
            await stub.GenerateUnary(request)

            told = await octavo("complete", "Hello there", "--target", target, "--max-tokens=3", "-v")
            assert told.returncode == 0, told.stderr
            request_id = told.stderr.split("(request ")[1].split(")")[0]
            shown = await octavo("explain", request_id, "--target", target)
            assert shown.returncode == 0, shown.stderr
            assert f"request {request_id} on replica 0, finished after" in shown.stdout
            assert "█" in shown.stdout
            assert shown.stderr.startswith(f"octavo: not reached: {gone}: ")

            lines = (await octavo("explain", "first", "--target", target, "--json")).stdout.splitlines()
            (timeline,) = map(json.loads, lines)
            assert [entry["moment"] for entry in timeline["entries"]] == [
                "queued",
                "admitted",
                "chunked",
                "chunked",
                "scheduled",
                "decoding",
                "finished",
            ]
            assert timeline["seconds"]["0"].keys() == {"queued", "prefill", "decode", "preempted", "not kept"}
            assert 0 < sum(timeline["seconds"]["0"].values()) <= timeline["now"]

            # A scheduler also answers directly.
            direct = await octavo("explain", "first", "--target", options.scheduler_address(0))
            assert "finished after" in direct.stdout
            unknown = await octavo("explain", "nobody", "--target", target)
            assert unknown.returncode == 1
            assert "request_id='nobody': no replica knows it" in unknown.stderr
            assert gone in unknown.stderr

            reset = await octavo("cache", "reset", "--target", target)
            assert reset.returncode == 0, reset.stderr
            assert reset.stdout.endswith(" cached KV blocks were forgotten\n")
            assert int(reset.stdout.split()[0]) >= 5
            result = await stub.GenerateUnary(request)
            assert result.usage.cached_tokens == 0
        away = await octavo("cache", "reset", "--target", target)
        assert away.returncode == 1
        assert "no cluster is ready at" in away.stderr
