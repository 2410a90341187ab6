"""Constraints at a router: what reaches the scheduler, what is refused, and that nobody else waits."""

import asyncio
import json
from pathlib import Path

import grpc
import grpc.aio
import pytest

from configs import features
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.server import RouterServer
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler, model_info
from tests.support.held_engine import HELD, HeldEngine

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASKED = pb.Constraint(json_schema=json.dumps(SCHEMA, indent=4), disable_any_whitespace=True)
NUM_TOKENS = 12


def _request(constraint: pb.Constraint | None, request_id: str = "", **sampling: object) -> pb.GenerateRequest:
    given = pb.SamplingParams(max_tokens=NUM_TOKENS, seed=7, constraint=constraint, **sampling)  # type: ignore[arg-type]
    return pb.GenerateRequest(prompt="Once upon a time", request_id=request_id, sampling=given)


def _replica(directory: Path, name: str = "one", **fields: object) -> FakeScheduler:
    fields = {"features": [features.CONSTRAINT], **fields}
    return FakeScheduler(socket_address(directory, name), **fields)  # type: ignore[arg-type]


def _outcomes(server: RouterServer) -> dict[str, int]:
    (family,) = server.metrics.constraints.collect()
    return {each.labels["outcome"]: int(each.value) for each in family.samples if each.name.endswith("_total")}


async def test_the_scheduler_and_started_have_the_canonical_form(tmp_path: Path) -> None:
    fake = _replica(tmp_path, pause_at=4)
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        call = stub.Generate(_request(ASKED))
        begun = await receive(call, until=lambda received: len(received.token_ids.get(0, ())) == 4)
        canonical = begun.started.sampling.constraint
        assert json.loads(canonical.json_schema) == SCHEMA
        assert len(canonical.json_schema) < len(ASKED.json_schema)
        assert canonical.disable_any_whitespace
        assert _outcomes(server) == {"compiled": 1}
        call.cancel()
        await fake.wait_until(lambda each: not each.num_live)
        await fake.resume_steps()
        request = begun.resume_request()
        begun.begin_again()
        resumed = await receive(stub.Generate(request), into=begun)
        assert resumed.started.sampling.constraint == canonical
        # The other formatting is another text, and the same form.
        await receive(stub.Generate(_request(ASKED)))
        assert _outcomes(server) == {"compiled": 1, "cached": 2}
    assert [submit.sampling.constraint for submit in fake.submitted] == [canonical] * 3


async def test_another_router_takes_the_canonical_form(tmp_path: Path) -> None:
    fake = _replica(tmp_path, pause_at=4)
    async with running_schedulers(fake):
        async with running_router([fake.address]) as (server, stub):
            await server.wait_ready()
            call = stub.Generate(_request(ASKED))
            begun = await receive(call, until=lambda received: len(received.token_ids.get(0, ())) == 4)
        request, canonical = begun.resume_request(), begun.begin_again().sampling.constraint
        async with running_router([fake.address]) as (server, stub):
            await server.wait_ready()
            await fake.resume_steps()
            resumed = await receive(stub.Generate(request), into=begun)
            assert resumed.started.sampling.constraint == canonical
            assert _outcomes(server) == {"compiled": 1}


WRONG = (
    (_request(pb.Constraint()), ": it has no kind: set json_schema, "),
    (_request(ASKED, ignore_eos=True), ": it does not go with ignore_eos"),
    (_request(pb.Constraint(json_schema="{")), ".json_schema: "),
    (_request(pb.Constraint(json_schema='{"not": {"const": 1}}')), ".json_schema: .*not"),
    (_request(pb.Constraint(regex="(a")), ".regex: "),
    (_request(pb.Constraint(grammar="start: nothing")), ".grammar: .*nothing"),
    (_request(pb.Constraint(choice=pb.Alternatives())), ".choice: "),
    (_request(pb.Constraint(structural_tag="[]")), ".structural_tag: "),
    (_request(pb.Constraint(regex="a", disable_any_whitespace=True)), ".regex: .*whitespace"),
)


async def test_what_is_refused_names_its_field(tmp_path: Path) -> None:
    fake = _replica(tmp_path)
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        for request, words in WRONG:
            with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.constraint" + words) as caught:
                await receive(stub.Generate(request))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not server.num_streams
        assert (await receive(stub.Generate(_request(ASKED)))).finished is not None
    assert len(fake.submitted) == 1


async def test_a_search_has_no_constraint(tmp_path: Path) -> None:
    fake = _replica(tmp_path)
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        request = _request(ASKED)
        request.beam_search.width = 2
        with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.constraint: it does not go with beam_search"):
            await receive(stub.Generate(request))


async def test_a_model_without_end_tokens_can_have_none(tmp_path: Path) -> None:
    fake = _replica(tmp_path, model=model_info(eos_token_ids=[]))
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        with pytest.raises(grpc.aio.AioRpcError, match="no token that ends an output") as caught:
            await receive(stub.Generate(_request(ASKED)))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (await receive(stub.Generate(_request(None)))).finished is not None


async def test_an_older_replica_gets_none(tmp_path: Path) -> None:
    older, newer = _replica(tmp_path, "older", features=(), pause_at=4), _replica(tmp_path, "newer", pause_at=4)
    async with running_schedulers(older, newer), running_router([older.address, newer.address]) as (server, stub):
        await server.wait_ready()
        calls = [stub.Generate(_request(ASKED, f"held{i}")) for i in range(4)]
        for call in calls:
            await receive(call, until=lambda received: bool(received.token_ids))
        for call in [stub.Generate(_request(None, f"free{i}")) for i in range(2)]:
            await receive(call, until=lambda received: bool(received.token_ids))
        assert {submit.request_id for submit in newer.submitted} == {f"held{i}" for i in range(4)}
        assert {submit.request_id for submit in older.submitted} == {"free0", "free1"}


async def test_a_cluster_of_older_replicas_refuses_it_by_name(tmp_path: Path) -> None:
    older = _replica(tmp_path, features=())
    async with running_schedulers(older), running_router([older.address]) as (server, stub):
        await server.wait_ready()
        with pytest.raises(grpc.aio.AioRpcError, match=r"sampling\.constraint is set") as caught:
            await receive(stub.Generate(_request(ASKED)))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert not older.submitted


async def test_one_that_takes_too_long_to_compile_is_refused(tmp_path: Path) -> None:
    """It takes half a second; streams go on beside it, and so does the next constraint."""
    patterns = {f"n{i}": {"pattern": "[a-z]{1,99}x"} for i in range(1200)}
    slow = pb.Constraint(json_schema=json.dumps({"type": "object", "properties": patterns}))
    fake = _replica(tmp_path)
    router = running_router([fake.address], constraint_compile_timeout=0.05)
    async with running_schedulers(fake), router as (server, stub):
        await server.wait_ready()
        with pytest.raises(grpc.aio.AioRpcError, match=r"json_schema: it takes more than 0\.05 s to compile") as caught:
            await receive(stub.Generate(_request(slow)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await receive(stub.Generate(_request(ASKED)))).finished is not None
        assert _outcomes(server) == {"compiled": 1, "refused": 1}


async def test_streams_go_on_while_a_constraint_is_compiled(tmp_path: Path) -> None:
    """Its caller may go away meanwhile. Another connection's constraint is compiled beside it."""
    fake, engine = _replica(tmp_path, pause_at=4), HeldEngine()
    async with running_schedulers(fake), running_router([fake.address]) as (server, stub):
        await server.wait_ready()
        server._constraints._make_compiler = lambda model: engine
        begun = stub.Generate(_request(None))
        received = await receive(begun, until=lambda each: len(each.token_ids.get(0, ())) == 4)
        slow = asyncio.create_task(receive(stub.Generate(_request(HELD))))
        await asyncio.to_thread(engine.has_begun.wait, 20)
        await fake.resume_steps()
        await receive(begun, into=received)
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as other:
            await receive(InferenceStub(other).Generate(_request(ASKED)))
        assert not slow.done()
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        engine.may_end.set()
