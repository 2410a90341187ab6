"""Cancel ends the newest attempt of a request. Real processes: two routers, two replicas, and a client whose path to
the first router died without a sign, and who resumed at the second one."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from benchmarks.faults.means.relay import Relay
from protos import admin_pb2
from protos import inference_pb2 as pb
from protos.admin_pb2_grpc import AdminStub
from protos.inference_pb2_grpc import InferenceStub
from tests.fakes.routers import receive
from tests.support.models.tiny_model import make_tiny_model
from tests.support.ports import free_ports
from tests.support.up import Up

# Streams that nobody ends last for many seconds.
NUM_TOKENS = 16_000
TIMEOUT = 60.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    directory = tmp_path_factory.mktemp("cancel")
    model = make_tiny_model(directory / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": NUM_TOKENS + 100}))
    with Up(
        directory,
        f"--model={model}",
        "--load-format=dummy",
        "--dtype=float32",
        "--kv-cache-memory=0.02",
        "--data-parallel-size=2",
        "--num-routers=2",
        port=free_ports(2),
        real=True,
    ) as up:
        up.wait_for("serving; Ctrl-C to stop")
        # The routers are told of the second replica a moment later.
        up.wait_for(" serves ", count=4)
        yield up


async def _observe(channel: grpc.aio.Channel) -> admin_pb2.ObserveResponse:
    admin: Any = AdminStub(channel)
    return await admin.Observe(admin_pb2.ObserveRequest())


@pytest.mark.parametrize("asked", [0, 1], ids=["at the first", "at the second"])
async def test_cancel_ends_the_attempt_that_the_client_has(up: Up, asked: int) -> None:
    targets = [f"127.0.0.1:{up.port + router}" for router in range(2)]
    async with (
        asyncio.timeout(TIMEOUT),
        Relay.to(targets[0]) as path,
        grpc.aio.insecure_channel(path.address) as broken,
        grpc.aio.insecure_channel(targets[0]) as first,
        grpc.aio.insecure_channel(targets[1]) as second,
    ):
        request_id = f"a{asked}"
        sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        stub: Any = InferenceStub(broken)
        stale = stub.Generate(pb.GenerateRequest(request_id=request_id, prompt="w5 w6", sampling=sampling))
        received = await receive(stale, until=lambda received: len(received.token_ids.get(0, ())) >= 5)
        path.to_dialer.hold()
        path.to_listener.hold()
        view = await _observe(first)
        (at,) = (each.replica_id for each in view.requests)
        here = next(each.address for each in view.replicas if each.replica_id == at)
        admin: Any = AdminStub(second)
        await admin.Hold(admin_pb2.HoldRequest(replica=here, state=admin_pb2.HOLD_STATE_PAUSED))
        resume = received.resume_request()
        received.begin_again()
        stub = InferenceStub(second)
        live = stub.Generate(resume)
        num_tokens = len(received.token_ids[0])
        await receive(live, into=received, until=lambda received: len(received.token_ids[0]) > num_tokens)
        assert [len((await _observe(channel)).requests) for channel in (first, second)] == [1, 1]

        stub = InferenceStub((first, second)[asked])
        answer = await stub.Cancel(pb.CancelRequest(request_id=request_id))
        assert answer == pb.CancelResponse(cancelled=True, attempt=1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await receive(live, into=received)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert not (await stub.Cancel(pb.CancelRequest(request_id=request_id))).cancelled
        for channel in (first, second):
            while (await _observe(channel)).router.num_streams > (channel is first):  # noqa: ASYNC110
                # Nothing tells it.
                await asyncio.sleep(0.05)
            assert not any(replica.num_running for replica in (await _observe(channel)).replicas)
        await admin.Hold(admin_pb2.HoldRequest(replica=here, state=admin_pb2.HOLD_STATE_NONE))
