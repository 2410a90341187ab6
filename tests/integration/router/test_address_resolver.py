"""A scheduler whose address is in a file: the router waits for the file, and follows it to another machine."""

from pathlib import Path

from protos import inference_pb2 as pb
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler

REQUEST = pb.GenerateRequest(
    prompt="Once upon a time", request_id="r", sampling=pb.SamplingParams(max_tokens=30, seed=7, ignore_eos=True)
)


def _write(path: Path, address: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(f"{address}\n")
    new.rename(path)


async def test_streams_go_on_where_the_file_says_that_the_scheduler_is_now(tmp_path: Path) -> None:
    """The old scheduler keeps the connection but sends nothing, like one whose machine can't be reached any more."""
    before, after = (FakeScheduler(socket_address(tmp_path, name)) for name in "ab")
    before.pause_at = 9
    file = tmp_path / "address"
    async with running_schedulers(before, after), running_router([f"file:{file}"]) as (server, stub):
        assert "its address is not known yet" in server.readiness()[1]
        _write(file, before.address)
        await server.wait_ready()
        received = await receive(call := stub.Generate(REQUEST), until=lambda r: len(r.token_ids.get(0, [])) == 9)
        _write(file, after.address)
        received = await receive(call, into=received)
        undisturbed = await receive(stub.Generate(pb.GenerateRequest(prompt=REQUEST.prompt, sampling=REQUEST.sampling)))
        assert before.num_live == 0, "the old scheduler still computes a stream"
    assert len(received.token_ids[0]) == 30
    assert received.token_ids == undisturbed.token_ids
    assert [len(start.output_token_ids) for start in after.submitted[0].choices] == [9]
