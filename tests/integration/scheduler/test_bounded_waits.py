"""Waits of a scheduler that would never end: for a router that says nothing, and for a thread that does not answer."""

import asyncio
import threading
from pathlib import Path

import grpc
import grpc.aio
import pytest

from protos import admin_pb2, inference_pb2
from protos.admin_pb2_grpc import AdminStub
from protos.scheduler_pb2_grpc import SchedulerStub
from scheduler import admin
from scheduler import server as server_module
from scheduler.ranks import heartbeats
from scheduler.sessions import commands
from scheduler.step_loop import step_loop
from tests.support.scheduler.scheduling import make_options, running_scheduler


async def test_a_session_that_never_begins_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_OPEN_S", 0.1)
    async with (
        running_scheduler(make_options(tmp_path)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
        asyncio.timeout(10),
    ):
        call = SchedulerStub(channel).Session()
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no open has come within 0.1 s" in await call.details()


async def test_questions_to_a_step_loop_that_does_not_answer_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "ANSWER_S", 0.1)
    run_command = step_loop.StepLoop._run_command

    def ignore_questions(self: step_loop.StepLoop, command: commands.Command, now: float) -> None:
        if isinstance(command, commands.Stop):
            run_command(self, command, now)

    monkeypatch.setattr(step_loop.StepLoop, "_run_command", ignore_questions)
    async with (
        running_scheduler(make_options(tmp_path)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
        asyncio.timeout(10),
    ):
        stub = AdminStub(channel)
        for call in (
            stub.Explain(admin_pb2.ExplainRequest(request_id="r")),
            stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest()),
            SchedulerStub(channel).Cancel(inference_pb2.CancelRequest(request_id="r")),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=r"has not answered for 0\.1 s") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_scheduler_ends_without_a_step_loop_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_STEP_LOOP_END_S", 0.2)
    released = threading.Event()

    def hang(self: step_loop.StepLoop, command: commands.Command, now: float) -> None:
        released.wait(30)
        raise RuntimeError("the hang is over")

    monkeypatch.setattr(step_loop.StepLoop, "_run_command", hang)
    async with asyncio.timeout(10):
        async with running_scheduler(make_options(tmp_path)) as server:
            pass
        assert server.step_loop.is_alive()
        released.set()
        await asyncio.to_thread(server.step_loop.join, 10)


@pytest.mark.parametrize("broken", [(step_loop, "open_connections"), (heartbeats, "bind_zmq")])
async def test_a_start_that_fails_unexpectedly_ends(
    broken: tuple[object, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that starts it waits for the thread that binds."""

    def fail(*args: object, **named: object) -> None:
        raise RuntimeError("what nobody expects")

    monkeypatch.setattr(*broken, fail)
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="what nobody expects"):
            async with running_scheduler(make_options(tmp_path)):
                raise AssertionError("it has started")
