"""The view of people who watch a cluster, by their rights, and replicas that an operator holds back."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from octavo.client.admin import Admin
from octavo.client.errors import InvalidRequest
from protos import admin_pb2 as pb
from protos import inference_pb2
from protos.admin_pb2_grpc import AdminStub
from router.server import RouterServer
from router.streams import migrations
from runtime.telemetry.quarantine import QuarantineNote, text_of, write_notes
from tests.fakes.hash_runner import HashModel
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler
from tests.support.scheduler.scheduling import Gate, make_options, running_scheduler, running_worker

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


def asked(request_id: str, max_tokens: int = 40) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingParams(max_tokens=max_tokens, seed=1)
    return inference_pb2.GenerateRequest(prompt="Once upon a time", request_id=request_id, sampling=sampling)


@contextlib.asynccontextmanager
async def admin_of(port: int) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield AdminStub(channel)


def texts(server: RouterServer, kind: str) -> list[str]:
    return [each.text for each in server.metrics.events.since(0) if each.kind == kind]


async def test_a_scheduler_shows_its_blocks_steps_ranks_and_sequences(tmp_path: Path) -> None:
    options = make_options(tmp_path, served_model_name="test-model")
    gate = Gate(first=6)
    async with (
        running_scheduler(options),
        running_worker(options, model=HashModel(vocab_size=49_152), before_step=gate),
        running_router([options.scheduler_address(0)]) as (server, stub),
        admin_of(server.port) as admin,
    ):
        await server.wait_ready()
        first = (await admin.Observe(pb.ObserveRequest())).replicas[0]
        assert first.is_observed
        assert (first.state, first.num_running, set(first.used_blocks)) == ("ready", 0, {0})
        stream = asyncio.create_task(receive(stub.Generate(asked("mine"))))
        await asyncio.to_thread(gate.reached.wait, 20)
        view = await admin.Observe(pb.ObserveRequest())
        (replica,) = view.replicas
        (sequence,) = replica.sequences
        assert (sequence.request_id, sequence.status) == ("mine", "running")
        # One cell a block, and as many used ones as the sequence holds.
        assert len(replica.used_blocks) == min(replica.num_blocks, 512)
        assert sequence.num_blocks >= 1
        assert sum(cell > 0 for cell in replica.used_blocks) == sequence.num_blocks
        assert replica.num_blocks - replica.num_available_blocks == sequence.num_blocks
        (rank,) = replica.ranks
        assert rank.rank == 0
        assert rank.state not in ("", "lost")
        assert 0 <= rank.silence < 5
        assert [step.step for step in replica.steps] == list(range(1, 1 + len(replica.steps)))
        assert replica.steps[0].num_prefill_tokens == sequence.num_prompt_tokens
        assert all(step.num_decode_tokens == 1 for step in replica.steps[1:])
        (request,) = view.requests
        assert (request.request_id, request.replica_id, request.max_tokens) == ("mine", "0", 40)
        assert request.num_prompt_tokens == sequence.num_prompt_tokens
        assert request.time_to_first_token > 0
        gate.open()
        await stream
        after = await admin.Observe(pb.ObserveRequest())
        assert after.router.num_output_tokens == after.replicas[0].totals.num_output_tokens == 40
        assert sum(after.router.time_to_first_token.counts) == 1
        assert not after.requests
        assert [text.split(":")[0] for text in texts(server, "ended")] == ["length"]


async def test_a_replica_that_cannot_be_observed_is_shown_as_the_session_tells(tmp_path: Path) -> None:
    """A scheduler without the call is an older one."""
    fake = FakeScheduler(socket_address(tmp_path, "one"), pause_at=3)
    async with (
        running_schedulers(fake),
        running_router([fake.address, socket_address(tmp_path, "nobody")]) as (server, stub),
        admin_of(server.port) as admin,
    ):
        async with asyncio.timeout(20):
            while not server.readiness()[0]:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
        stream = stub.Generate(asked("mine"))
        await receive(stream, until=lambda received: len(received.token_ids.get(0, ())) == 3)
        there, away = (await admin.Observe(pb.ObserveRequest())).replicas
        assert not there.is_observed
        assert (there.state, there.num_running, there.num_blocks) == ("ready", 1, 1000)
        assert (away.state, away.is_observed) == ("away", False)
        stream.cancel()


async def test_a_replica_that_was_stopped_for_a_while_is_shown_as_such(tmp_path: Path) -> None:
    """`octavo up` says so in a file; of one that has a Session the file says nothing new."""
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    gone = socket_address(tmp_path, "nobody")

    def note(replica: int, until: float) -> None:
        write_notes(runtime, text_of({replica: QuarantineNote(count=3, until=until, cause="worker 1.0 died.")}))

    async with (
        running_schedulers(fake),
        running_router([fake.address, gone], runtime_dir=runtime) as (server, _),
        admin_of(server.port) as admin,
    ):
        async with asyncio.timeout(20):
            while not server.readiness()[0]:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)

        async def seen() -> tuple[list[str], list[float | None]]:
            view = await admin.Observe(pb.ObserveRequest())
            value = server.metrics.registry.get_sample_value
            names = ("octavo_replica_quarantined", "octavo_replica_quarantines_total")
            return [each.state for each in view.replicas], [value(name, {"replica": gone}) for name in names]

        assert await seen() == (["ready", "away"], [0, 0])
        note(1, time.time() + 60)
        assert await seen() == (["ready", "quarantined"], [1, 3])
        assert "in quarantine, tried again in" in server.readiness()[1]
        assert "worker 1.0 died." in server.readiness()[1]
        note(1, 0)
        assert await seen() == (["ready", "away"], [0, 3])
        note(0, time.time() + 60)
        assert (await seen())[0] == ["ready", "away"]


@contextlib.asynccontextmanager
async def with_keys(fake: FakeScheduler, directory: Path) -> AsyncIterator[tuple[RouterServer, Any, Any]]:
    path = directory / "keys.yaml"
    path.write_text(f"keys:\n- {{name: alice, key: {ALICE}, admin: true}}\n- {{name: bob, key: {BOB}}}\n")
    path.chmod(0o600)
    async with (
        running_router([fake.address], api_keys_file=str(path)) as (server, stub),
        admin_of(server.port) as admin,
    ):
        await server.wait_ready()
        yield server, stub, admin


def as_(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def test_a_tenant_sees_its_own_requests_and_an_admin_the_cluster(tmp_path: Path) -> None:
    fake = FakeScheduler(socket_address(tmp_path, "one"), pause_at=3)
    async with running_schedulers(fake), with_keys(fake, tmp_path) as (_, stub, admin):
        streams = []
        for key in (ALICE, BOB):
            streams.append(stream := stub.Generate(asked(f"r-{key[:3]}"), metadata=as_(key)))
            await receive(stream, until=lambda received: len(received.token_ids.get(0, ())) == 3)
        alice = await admin.Observe(pb.ObserveRequest(), metadata=as_(ALICE))
        assert [each.request_id for each in alice.requests] == ["r-ali", "bob/r-bob"]
        assert len(alice.replicas) == 1
        bob = await admin.Observe(pb.ObserveRequest(), metadata=as_(BOB))
        assert [each.request_id for each in bob.requests] == ["r-bob"]
        assert not bob.replicas
        assert not bob.router.num_streams
        for call in (
            admin.Hold(pb.HoldRequest(replica=fake.address, state=pb.HOLD_STATE_PAUSED), metadata=as_(BOB)),
            admin.Migrate(pb.MigrateRequest(request_id="r-bob"), metadata=as_(BOB)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        # An admin may name another tenant's request; nobody else may.
        for key, code in ((ALICE, grpc.StatusCode.FAILED_PRECONDITION), (BOB, grpc.StatusCode.PERMISSION_DENIED)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin.Migrate(pb.MigrateRequest(request_id="bob/r-bob"), metadata=as_(key))
            assert caught.value.code() is code
        for stream in streams:
            stream.cancel()


async def test_a_paused_replica_keeps_its_streams_and_gets_no_more(tmp_path: Path) -> None:
    first, second = (FakeScheduler(socket_address(tmp_path, name), pause_at=3) for name in "ab")
    async with (
        running_schedulers(first, second),
        running_router([first.address, second.address]) as (server, stub),
        admin_of(server.port) as admin,
    ):
        await server.wait_ready()
        began = stub.Generate(asked("began", 6))
        received = await receive(began, until=lambda received: len(received.token_ids.get(0, ())) == 3)
        here, there = (first, second) if first.num_live else (second, first)
        await admin.Hold(pb.HoldRequest(replica=here.address, state=pb.HOLD_STATE_PAUSED))
        there.pause_at = None
        for i in range(4):
            await receive(stub.Generate(asked(f"later{i}", 6)))
        assert len(there.submitted) == 4
        assert here.num_live == 1
        states = {each.address: each.state for each in (await admin.Observe(pb.ObserveRequest())).replicas}
        assert states == {here.address: "paused", there.address: "ready"}
        here.pause_at = None
        await here.resume_steps()
        assert (await receive(began, into=received)).finished is not None
        released = await admin.Hold(pb.HoldRequest(replica=here.address, state=pb.HOLD_STATE_NONE))
        assert released.before == pb.HOLD_STATE_PAUSED
        assert any("paused by an operator" in text for text in texts(server, "replica"))


async def test_a_drained_replica_hands_its_streams_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "_SETTLE_S", 0.01)
    first, second = (FakeScheduler(socket_address(tmp_path, name), pause_at=3) for name in "ab")
    async with (
        running_schedulers(first, second),
        running_router([first.address, second.address]) as (server, stub),
        admin_of(server.port) as admin,
    ):
        await server.wait_ready()
        began = stub.Generate(asked("began", 40))
        received = await receive(began, until=lambda received: len(received.token_ids.get(0, ())) == 3)
        here, there = (first, second) if first.num_live else (second, first)
        there.pause_at = None
        answer = await admin.Hold(pb.HoldRequest(replica=here.address, state=pb.HOLD_STATE_DRAINED))
        assert answer.num_streams == 1
        whole = await receive(began, into=received)
        assert whole.finished is not None
        assert len(whole.token_ids[0]) == 40
        assert len(there.submitted) == 1
        (text,) = texts(server, "migrated")
        assert "(drain), after 3 output tokens" in text


async def test_operators_clients_observe_and_hold(tmp_path: Path) -> None:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake), running_router([fake.address]) as (server, _):
        await server.wait_ready()

        def operate() -> list[str]:
            with Admin(f"127.0.0.1:{server.port}") as admin:
                seen = [admin.observe().replicas[0].state]
                for state in ("paused", "drained", "none"):
                    assert admin.hold(fake.address, state) == 0
                    seen.append(admin.observe().replicas[0].state)
                with pytest.raises(ValueError, match="state='gone': it must be one of none, paused, drained"):
                    admin.hold(fake.address, "gone")
                with pytest.raises(InvalidRequest, match="this router knows"):
                    admin.hold("elsewhere", "none")
            return seen

        assert await asyncio.to_thread(operate) == ["ready", "paused", "drained", "ready"]
