"""`python -m scheduler` as a process: its start, health and metrics, end and restart."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.utils import floatToGoString

from configs.options import Options
from protos import scheduler_pb2
from tests.fakes.hash_runner import HashModel
from tests.support.ports import free_port
from tests.support.repository import ROOT
from tests.support.scheduler.scheduler_process import Process, scheduler_process
from tests.support.scheduler.scheduling import TIMEOUT, RouterEnd, make_options, running_worker
from tests.support.up import environment
from worker.errors import PermanentError

PROMPT = list(range(20, 60))


@contextlib.asynccontextmanager
async def serving(options: Options) -> AsyncIterator[tuple[Process, RouterEnd]]:
    with scheduler_process(options) as scheduler:
        async with RouterEnd(scheduler.address) as router:
            yield scheduler, router


async def test_sigterm_drains_and_ends_in_order(tmp_path: Path):
    options = make_options(tmp_path)
    with scheduler_process(options) as scheduler:
        async with running_worker(options) as worker:
            async with RouterEnd(scheduler.address) as router:
                group = await router.submit(PROMPT, max_tokens=400)
                await router.wait_for(lambda: router.tokens[group, 0])
                scheduler.terminate()
                await router.wait_for(lambda: router.loads[-1].draining)
                late = await router.rejection(await router.submit(PROMPT))
                assert late.reason == scheduler_pb2.REJECT_REASON_DRAINING
                await router.finish(group)
                assert router.tokens[group, 0] == HashModel().generate(PROMPT, 400)
                status, _ = await router.end()
                assert status == grpc.StatusCode.UNAVAILABLE
            # The worker was told to end, so its exit code is 0.
            assert await asyncio.to_thread(worker.join) == 0
        assert (await asyncio.to_thread(scheduler.end))[0] == 0


@pytest.mark.parametrize("drain_timeout", [0.3, 3600.0])
async def test_a_drain_ends_after_its_timeout_or_with_a_second_signal(tmp_path: Path, drain_timeout: float):
    options = make_options(tmp_path, drain_timeout=drain_timeout)
    async with serving(options) as (scheduler, router):
        async with running_worker(options):
            await router.wait_for(lambda: router.welcomes)
        # Without workers the request never finishes.
        group = await router.submit(PROMPT, max_tokens=4)
        await router.wait_for(lambda: router.loads[-1].num_waiting == 1)
        scheduler.terminate()
        if drain_timeout > 100:
            await router.wait_for(lambda: router.loads[-1].draining)
            scheduler.terminate()
        assert (await router.end())[0] == grpc.StatusCode.UNAVAILABLE
        assert (group, 0) not in router.finishes
        assert (await asyncio.to_thread(scheduler.end))[0] == 0


async def test_kill_9_leaves_nothing_in_the_way_and_workers_come_back_by_themselves(tmp_path: Path):
    options = make_options(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        async with serving(options) as (scheduler, router):
            await stack.enter_async_context(running_worker(options))
            await router.finish(await router.submit(PROMPT, max_tokens=4))
            epoch = router.welcomes[0].epoch
            scheduler.process.kill()
            assert (await router.end())[0] == grpc.StatusCode.UNAVAILABLE
        async with serving(options) as (_, router):
            group = await router.submit(PROMPT, max_tokens=4)
            await router.finish(group)
            assert router.tokens[group, 0] == HashModel().generate(PROMPT, 4)
            assert router.welcomes[0].epoch > epoch


async def test_a_live_scheduler_keeps_its_sockets(tmp_path: Path):
    options = make_options(tmp_path)
    async with serving(options) as (_, router), running_worker(options):
        await router.wait_for(lambda: router.welcomes)
        with scheduler_process(options) as second:
            code, said = await asyncio.to_thread(second.end)
        assert code == 2
        assert "is in use by a running scheduler" in said
        assert "Traceback" not in said
        await router.finish(await router.submit(PROMPT, max_tokens=4))


@pytest.mark.parametrize("option", ["scheduler_addresses", "metrics_port", "step_addresses"])
async def test_a_port_in_use_is_said_plainly(tmp_path: Path, option: str):
    changes: dict[str, object] = {}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if option == "metrics_port":
            changes = {"metrics_port": min(port - 1, 60_000)}
        elif option == "scheduler_addresses":
            changes = {"scheduler_addresses": (f"127.0.0.1:{port}",)}
        else:
            from runtime.security.curve import make_keys

            make_keys(tmp_path / "keys")
            changes = {"step_addresses": (f"tcp://127.0.0.1:{port}",), "curve_dir": str(tmp_path / "keys")}
        with contextlib.ExitStack() as stack:
            if option == "metrics_port" and port - 1 > 60_000:
                stack.enter_context(socket.create_server(("127.0.0.1", 60_001)))
            scheduler = stack.enter_context(scheduler_process(make_options(tmp_path, **changes)))
            code, said = await asyncio.to_thread(scheduler.end)
    assert code == 2
    assert option in said
    assert "Address already in use" in said or "in use" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-num-sqs=4"], "did you mean --max-num-seqs?"),
        (["--replica=1"], "--replica='1'"),
        (["--max-num-seqs=0"], "max_num_seqs='0'"),
    ],
)
def test_bad_flags_are_named(tmp_path: Path, flags: list[str], words: str):
    with scheduler_process(make_options(tmp_path), *flags) as scheduler:
        code, said = scheduler.end()
    assert (code, words in said, "Traceback" in said) == (2, True, False)


def test_an_open_runtime_dir_is_refused(tmp_path: Path):
    options = make_options(tmp_path)
    options.runtime_dir.mkdir(mode=0o755)
    with scheduler_process(options) as scheduler:
        code, said = scheduler.end()
    assert code == 2
    assert "open to others" in said


async def test_a_permanent_failure_exits_non_zero_with_its_cause(tmp_path: Path):
    def load() -> None:
        raise PermanentError("no weights")

    options = make_options(tmp_path)
    with scheduler_process(options) as scheduler:
        async with running_worker(options, load=load) as worker:
            code, said = await asyncio.to_thread(scheduler.end)
            assert await asyncio.to_thread(worker.join) == 2
    assert code == 2
    assert "failed for good: no weights" in said


async def test_health_metrics_and_reflection(tmp_path: Path):
    options = make_options(tmp_path, metrics_port=free_port())
    url = f"http://127.0.0.1:{options.process_metrics_port('scheduler')}"
    async with serving(options) as (scheduler, router), grpc.aio.insecure_channel(scheduler.address) as channel:
        # The generated stubs' types are those of the synchronous channel.
        stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[arg-type]

        async def check(service: str) -> int:
            request = health_pb2.HealthCheckRequest(service=service)
            return (await stub.Check(request, wait_for_ready=True)).status

        serving_status = health_pb2.HealthCheckResponse.SERVING
        assert await check("") == serving_status
        assert await check("octavo.v1.Scheduler") != serving_status
        assert "waiting for rank 0" in await _until(f"{url}/health", "waiting for rank", healthy=False)
        async with running_worker(options):
            await router.finish(await router.submit(PROMPT, max_tokens=4))
            assert await check("octavo.v1.Scheduler") == serving_status
            await router.wait_idle()
            assert "0 running" in await _until(f"{url}/health", "0 running", healthy=True)
            text = await _until(f"{url}/metrics", "octavo_generation_tokens_total 4.0", healthy=True)
            for name in (
                "octavo_num_requests_running 0.0",
                "octavo_num_requests_waiting 0.0",
                "octavo_kv_cache_usage_ratio 0.0",
                "octavo_num_preemptions_total 0.0",
                "octavo_prompt_tokens_total 40.0",
                "octavo_prefix_cache_queries_total 40.0",
                "octavo_prefix_cache_hits_total 0.0",
                "octavo_step_duration_seconds_count 4.0",
                "octavo_schedule_duration_seconds_count 4.0",
                "octavo_invalid_messages_total 0.0",
                'octavo_event_loop_lag_seconds_count{thread="step_loop"}',
                f"octavo_worker_epoch {floatToGoString(router.welcomes[0].epoch)}",
            ):
                assert name in text, name
            services = await _reflected(channel)
            assert {"octavo.v1.Scheduler", "grpc.health.v1.Health"} <= services
            # The process is small: it imports neither torch nor transformers.
            assert psutil.Process(scheduler.process.pid).memory_full_info().uss < 70e6


async def _until(url: str, words: str, *, healthy: bool) -> str:
    """Waits until the page contains the words; returns it. The process refreshes it at least once a second."""

    def read() -> tuple[bool, str]:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
                return True, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return False, error.read().decode()
        except urllib.error.URLError:
            return False, ""

    async with asyncio.timeout(TIMEOUT):
        while True:
            ok, text = await asyncio.to_thread(read)
            if words in text:
                assert ok == healthy, text
                return text
            await asyncio.sleep(0.1)


async def _reflected(channel: grpc.aio.Channel) -> set[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    async for response in stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")])):
        return {service.name for service in response.list_services_response.service}
    return set()


def test_nothing_heavy_is_imported():
    heavy = "{'torch', 'transformers'} & set(sys.modules)"
    command = [sys.executable, "-c", f"import sys, scheduler.__main__; sys.exit(str({heavy}) if {heavy} else 0)"]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | environment())
