"""Ranks that come, go, fall silent, fail or have other options, over real ZeroMQ sockets; streams continue exactly."""

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest
import zmq

from protos import inference_pb2, step_pb2
from runtime.security.curve import make_keys
from runtime.wire import heartbeat_endpoint, rank_identity
from tests.fakes.hash_runner import HashModel
from tests.fakes.worker import FakeWorker
from tests.support.peer import Peer
from tests.support.ports import free_ports
from tests.support.scheduler.scheduling import (
    TIMEOUT,
    RouterEnd,
    make_options,
    running_scheduler,
    running_worker,
    worker_process,
)
from tests.support.scheduler.steps import result_columns
from tests.support.stall import stand_still
from worker.errors import PermanentError, PlanError

PROMPT = list(range(20, 60))


@pytest.mark.parametrize("steps", [1, 3])
async def test_kill_9_of_a_worker_pauses_its_streams_and_they_go_on_exactly(tmp_path: Path, steps: int):
    options, model = make_options(tmp_path, max_steps_in_flight=steps), HashModel()
    async with running_scheduler(options) as server, RouterEnd(server.address) as router:
        with worker_process(options, "--step-seconds=0.005") as first:
            groups = [await router.submit([30 + i, *PROMPT], max_tokens=150, seed=i) for i in range(4)]
            await router.wait_for(lambda: all(len(tokens) > 5 for tokens in router.tokens.values()))
            first.kill()
            await router.wait_for(lambda: not router.loads[-1].workers_ready)
            assert router.loads[-1].num_waiting == 4
            # Requests that come meanwhile are queued.
            groups.append(await router.submit([34, *PROMPT], max_tokens=150, seed=4))
        with worker_process(options):
            for i, group in enumerate(groups):
                await router.finish(group)
                assert router.tokens[group, 0] == model.generate([30 + i, *PROMPT], 150, seed=i)
        assert len(router.welcomes) == 2
        assert router.welcomes[1].epoch > router.welcomes[0].epoch
        lost = server.step_loop.metrics.registry.get_sample_value(
            "octavo_preemptions_by_reason_total", {"reason": "workers_lost"}
        )
        assert lost == 4


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        ({"protocol_version": 99}, "protocol_version is 99 at the worker but 2 at the scheduler"),
        ({"octavo_version": "0.0.1"}, "octavo_version is '0.0.1' at the worker"),
        ({"model": "other"}, "served_model_name is 'other' at the worker but 'hashes' at the scheduler"),
        ({"block_size": 16}, "block_size is 16 at the worker but 8 at the scheduler"),
        ({"max_num_seqs": 4}, "max_num_seqs is 4"),
        ({"max_num_batched_tokens": 9}, "max_num_batched_tokens is 9"),
        ({"world_size": 2}, "world_size is 2"),
        ({"rank": 1}, "rank is 1, but world_size=1"),
    ],
)
async def test_a_worker_that_differs_is_refused_and_the_right_one_serves_on(
    tmp_path: Path, hello: dict, words: str, caplog: pytest.LogCaptureFixture
):
    options = make_options(tmp_path)
    async with running_scheduler(options) as server, running_worker(options), RouterEnd(server.address) as router:
        group = await router.submit(PROMPT, max_tokens=100)
        wrong = FakeWorker(options, hello=hello).start()
        # Permanent: `octavo up` need not start it again.
        assert await asyncio.to_thread(wrong.join) == 2
        assert any(words in record.getMessage() for record in caplog.records)
        await router.finish(group)
        assert len(router.welcomes) == 1


async def test_a_second_worker_of_a_rank_is_refused_while_the_first_lives(tmp_path: Path):
    options = make_options(tmp_path)
    async with running_scheduler(options) as server, running_worker(options), RouterEnd(server.address) as router:
        await router.finish(await router.submit(PROMPT, max_tokens=4))
        second = FakeWorker(options).start()
        assert await asyncio.to_thread(second.join) == 1
        await router.finish(await router.submit(PROMPT, max_tokens=4))
        assert len(router.welcomes) == 1


async def test_malformed_bytes_and_unknown_peers_are_counted_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    options, model = make_options(tmp_path), HashModel()
    endpoint = options.step_address(0)
    async with running_scheduler(options) as server, running_worker(options), RouterEnd(server.address) as router:
        group = await router.submit(PROMPT, max_tokens=300)
        await router.wait_for(lambda: router.tokens[group, 0])
        epoch = router.welcomes[0].epoch
        result = step_pb2.StepResult(epoch=epoch, step=5, **result_columns([1], [4], [999]))
        registry = server.step_loop.metrics.registry
        with (
            Peer(endpoint, b"stranger") as stranger,
            Peer(endpoint, rank_identity(epoch, 0)) as pretender,
            Peer(heartbeat_endpoint(endpoint), b"noise") as noise,
        ):
            for _ in range(20):
                stranger.socket.send(b"\xff\xff\xff not a message")
            stranger.socket.send_multipart([b"two", b"frames"])
            stranger.send(step_pb2.WorkerToScheduler(result=result))
            stranger.send(step_pb2.WorkerToScheduler(failure=step_pb2.Failure(message="no", permanent=True)))
            stranger.say_hello()  # not from a join- identity
            pretender.send(step_pb2.WorkerToScheduler(result=result))
            noise.socket.send(b"\xff\xff")
            noise.socket.send_multipart([b"a", b"b"])
            noise.socket.send(b"x" * 10_000)  # beyond the bound: the connection is dropped
            await router.finish(group)
            await router.wait_for(lambda: (registry.get_sample_value("octavo_invalid_messages_total") or 0) >= 26)
        assert router.tokens[group, 0] == model.generate(PROMPT, 300)
        assert len(router.welcomes) == 1
    lines = [record for record in caplog.records if "b'stranger'" in record.getMessage()]
    assert len(lines) == 1


@pytest.mark.parametrize("steps", [1, 3])
async def test_a_stalled_step_ends_the_epoch_and_streams_go_on_exactly(tmp_path: Path, steps: int):
    options, release = make_options(tmp_path, step_timeout=0.2, max_steps_in_flight=steps), threading.Event()
    stalls = iter([True])

    def stall(plan: step_pb2.StepPlan) -> None:
        if plan.step == 5 and next(stalls, False):
            assert release.wait(60)

    async with (
        running_scheduler(options) as server,
        running_worker(options, before_step=stall),
        RouterEnd(server.address) as router,
    ):
        group = await router.submit(PROMPT, max_tokens=30)
        await router.wait_for(lambda: router.loads and not router.loads[-1].workers_ready)
        assert router.loads[-1].num_waiting == 1
        # The result of the stalled step belongs to an old epoch now.
        release.set()
        await router.finish(group)
        assert router.tokens[group, 0] == HashModel().generate(PROMPT, 30)


@pytest.mark.parametrize("steps", [1, 3])
async def test_a_failed_step_ends_the_epoch_and_streams_go_on_exactly(tmp_path: Path, steps: int):
    # Steps behind it in the socket must not be computed.
    options, failures = make_options(tmp_path, max_steps_in_flight=steps), iter([True, True])

    def fail(plan: step_pb2.StepPlan) -> None:
        if plan.step == 3 and next(failures, False):
            raise PlanError("out of luck")

    async with (
        running_scheduler(options) as server,
        running_worker(options, before_step=fail),
        RouterEnd(server.address) as router,
    ):
        group = await router.submit(PROMPT, max_tokens=30)
        await router.finish(group)
        assert router.tokens[group, 0] == HashModel().generate(PROMPT, 30)
        assert len(router.welcomes) == 3


async def test_a_permanent_failure_ends_the_scheduler_with_its_cause(tmp_path: Path):
    options = make_options(tmp_path)

    def load() -> None:
        raise PermanentError("model.safetensors is corrupt")

    async with running_scheduler(options) as server:
        worker = FakeWorker(options, load=load).start()
        cause = await asyncio.wait_for(server.wait(), TIMEOUT)
        assert cause is not None
        assert "model.safetensors is corrupt" in cause
        assert await asyncio.to_thread(worker.join) == 2


async def test_a_returning_worker_of_another_fingerprint_ends_the_scheduler(tmp_path: Path):
    options = make_options(tmp_path)
    async with running_scheduler(options) as server, RouterEnd(server.address) as router:
        async with running_worker(options):
            await router.wait_for(lambda: router.welcomes)
        other = FakeWorker(options, model=HashModel(fingerprint="others")).start()
        cause = await asyncio.wait_for(server.wait(), TIMEOUT)
        assert cause == "fingerprint is 'others' at this epoch of workers but 'hashes' at the one before it"
        assert await asyncio.to_thread(other.join) == 2


async def test_a_new_epoch_may_have_another_number_of_blocks(tmp_path: Path):
    options = make_options(tmp_path)
    async with running_scheduler(options) as server, RouterEnd(server.address) as router:
        async with running_worker(options, model=HashModel(num_blocks=64)):
            await router.finish(await router.submit(PROMPT, max_tokens=4))
        await router.wait_for(lambda: not router.loads[-1].workers_ready)
        large = await router.submit(PROMPT, max_tokens=400)
        small = await router.submit(PROMPT, max_tokens=4)
        async with running_worker(options, model=HashModel(num_blocks=10)):
            finish = await router.finish(large)
            assert finish.reason == inference_pb2.FINISH_REASON_ERROR
            assert "lower max_tokens" in finish.message
            await router.finish(small)
            assert (await router.wait_idle()).num_blocks == 10


async def test_a_stall_of_the_scheduler_itself_loses_no_rank(tmp_path: Path):
    # Its step loop wakes before the thread that reads heartbeats, or after it.
    options = make_options(tmp_path, heartbeat_timeout=1.5, step_timeout=1.5)
    async with running_scheduler(options) as server, RouterEnd(server.address) as router:
        # A process of its own: its heartbeats and results arrive in time.
        with worker_process(options, "--step-seconds=0.02"):
            group = await router.submit(PROMPT, max_tokens=400)
            await router.wait_for(lambda: len(router.tokens[group, 0]) > 5)
            for _ in range(4):
                stand_still(2.0)
                count = len(router.tokens[group, 0])
                await router.wait_for(lambda count=count: len(router.tokens[group, 0]) > count + 5)
            await router.finish(group)
        assert router.tokens[group, 0] == HashModel().generate(PROMPT, 400)
        assert [welcome.epoch for welcome in router.welcomes] == [router.welcomes[0].epoch]


async def test_silence_is_a_loss(tmp_path: Path):
    options = make_options(tmp_path, heartbeat_timeout=0.5)
    model = HashModel().info(options)
    async with running_scheduler(options) as server, RouterEnd(server.address) as router:
        with Peer(options.step_address(0), b"join-1") as joining:
            joining.say_hello()
            epoch = (await joining.expect("reset")).epoch
        with Peer(options.step_address(0), rank_identity(epoch, 0)) as rank:
            rank.say_ready(epoch, model)
            await router.wait_for(lambda: router.loads and router.loads[-1].workers_ready)
            # It is connected, but sends no heartbeats, like a rank that hangs.
            await router.wait_for(lambda: not router.loads[-1].workers_ready)


async def test_a_rank_whose_connection_broke_is_taken_back_without_a_new_hello(tmp_path: Path):
    options = make_options(tmp_path)
    model, endpoint = HashModel().info(options), options.step_address(0)
    async with running_scheduler(options) as server, RouterEnd(server.address) as router:
        with Peer(endpoint, b"join-1") as joining:
            joining.say_hello(instance=7)
            epoch = (await joining.expect("reset")).epoch
        with Peer(endpoint, rank_identity(epoch, 0)) as rank:
            rank.say_ready(epoch, model)
            await router.wait_for(lambda: router.loads and router.loads[-1].workers_ready)
        await router.wait_for(lambda: not router.loads[-1].workers_ready)
        with Peer(endpoint, rank_identity(epoch, 0)) as rank, Peer(heartbeat_endpoint(endpoint), b"beat") as beats:
            beats.socket.send(step_pb2.Heartbeat(epoch=epoch, instance=7).SerializeToString())
            assert (await rank.expect("reset")).epoch == epoch + 1


@pytest.mark.parametrize("dies", [False, True])
async def test_a_step_is_blamed_for_a_death_and_not_for_a_lost_connection(tmp_path: Path, dies: bool):
    # Both break the connection while the step is in flight; the instance that comes back tells them apart.
    options = make_options(tmp_path)
    model, endpoint = HashModel().info(options), options.step_address(0)
    async with running_scheduler(options) as server, RouterEnd(server.address) as router:
        group = 0
        for life in range(5):
            with Peer(endpoint, b"join-%d" % life) as joining:
                joining.say_hello(instance=life if dies else 7)
                epoch = (await joining.expect("reset")).epoch
            with Peer(endpoint, rank_identity(epoch, 0)) as rank:
                rank.say_ready(epoch, model)
                group = group or await router.submit(PROMPT, max_tokens=4)
                if dies and life == 3:
                    finish = await router.finish(group)
                    assert finish.message == "the workers failed in each of 3 steps that computed it"
                    break
                assert (await rank.expect("plan")).step == 1
                await router.wait_for(lambda: router.loads[-1].workers_ready)
            await router.wait_for(lambda: not router.loads[-1].workers_ready)
        assert (group, 0) in router.finishes or not dies


async def test_curve_over_tcp_lets_in_only_known_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    keys, others = tmp_path / "keys", tmp_path / "others"
    make_keys(keys)
    make_keys(others)
    (others / "scheduler.key").write_bytes((keys / "scheduler.key").read_bytes())
    endpoint = f"tcp://127.0.0.1:{free_ports(2)}"
    options = make_options(tmp_path, step_addresses=(endpoint,), curve_dir=str(keys))
    async with running_scheduler(options) as server, RouterEnd(server.address) as router:
        with Peer(endpoint, b"join-plain") as plain, Peer(endpoint, b"join-other", others) as other:
            for stranger in (plain, other):
                stranger.socket.sndtimeo = 0
                # A peer that has already been refused has no connection to send over.
                with contextlib.suppress(zmq.Again):
                    stranger.say_hello()
            async with running_worker(options):
                group = await router.submit(PROMPT, max_tokens=8)
                await router.finish(group)
                assert router.tokens[group, 0] == HashModel().generate(PROMPT, 8)
            # The scheduler heard neither of them, else it would have answered.
            assert not plain.socket.poll(0)
            assert not other.socket.poll(0)
        assert any("allowed_workers" in record.getMessage() for record in caplog.records)
