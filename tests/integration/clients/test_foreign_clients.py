"""smg and tritonclient from PyPI, each in its own environment, against the router; a fake scheduler computes.

`python -m benchmarks.cluster.foreign_clients` runs the same clients on real workers and shares the environments.
"""

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.cluster.foreign_clients import MAX_TOKENS, PROMPT, environments, install, run_smg, run_triton
from protos import inference_pb2 as pb
from tests.fakes.routers import receive, running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler


def _seedless(token_ids: object, num_prompt_tokens: int, seed: int, choice: int) -> int:
    """Plain words that do not depend on the seed, which neither client can set here."""
    assert isinstance(token_ids, list)
    return 1000 + len(token_ids)


# An installation may take 300 s.
@pytest.mark.timeout(450)
@pytest.mark.parametrize(
    ("name", "run", "compat"),
    [
        ("smg", run_smg, "smg"),
        # SMG looks which engine it has before it, and there is none but SGLang's.
        ("smg", run_smg, "sglang"),
        ("triton", run_triton, "kserve"),
    ],
)
async def test_it_streams_what_our_own_call_gives(
    tmp_path: Path, name: str, run: Callable[[Path, str], str], compat: str
) -> None:
    directory = environments() / name
    try:
        await asyncio.to_thread(install, name, directory)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"pip can't install {name}: {error}: {error.stderr}")
    scheduler = FakeScheduler(socket_address(tmp_path, "one"), next_token=_seedless)
    async with running_schedulers(scheduler), running_router([scheduler.address], compat=compat) as (server, stub):
        await server.wait_ready()
        sampling = pb.SamplingParams(max_tokens=MAX_TOKENS)
        expected = await receive(stub.Generate(pb.GenerateRequest(prompt=PROMPT, sampling=sampling)))
        assert await asyncio.to_thread(run, directory, f"127.0.0.1:{server.port}") == expected.text[0]
