"""octavo-client, built and installed alone: grpcio and protobuf are all it needs, and it is the same client."""

import asyncio
import importlib.metadata
import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from octavo import AsyncClient, SamplingParams
from tests.fakes.routers import running_router, running_schedulers, socket_address
from tests.fakes.scheduler import FakeScheduler
from tests.support.repository import ROOT
from tests.support.wheels import CLIENT, build_wheel, pip

# What it may import beside the standard library: grpcio and its own requirement, and protobuf.
NEEDED = ("grpcio", "protobuf", "typing-extensions")

PROGRAM = """
import asyncio, json, octavo, sys
from octavo import AsyncClient, Client, Delta, SamplingParams
from octavo.client.admin import Admin
from octavo.client.errors import InvalidRequest, RequestNotFound

target, sampling = sys.argv[1], SamplingParams(max_tokens=12, seed=3, n=2)

async def in_tasks():
    async with AsyncClient(target) as client:
        whole = await client.generate("Once upon", sampling)
        async with client.stream("Once upon", sampling, request_id="a", detach_timeout=60) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    break
        async with client.attach("a") as stream:
            async for _ in stream:
                pass
        assert stream.generation.choices == whole.choices
        return [choice.token_ids for choice in whole.choices]

with Client(target) as client:
    texts = [choice.text for choice in client.generate("Once upon", sampling).choices]
    assert client.detokenize(client.tokenize("hello").token_ids) == "hello"
    assert client.cancel("unknown") is False
    try:
        client.generate("x", SamplingParams(temperature=-1))
    except InvalidRequest as error:
        assert "temperature=-1" in str(error), error
for name in ("LLM", "AsyncLLM", "CompilationConfig"):
    try:
        getattr(octavo, name)
    except ImportError as error:
        assert "install octavo" in str(error), error
    else:
        raise AssertionError(name)
heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "tenacity", "pydantic", "zmq"})
print(json.dumps({"texts": texts, "token_ids": asyncio.run(in_tasks()), "heavy": heavy, "path": sys.path}))
"""


def link_needed(site: Path) -> None:
    """Links the packages NEEDED into an environment: nothing may be downloaded."""
    for name in NEEDED:
        for file in importlib.metadata.files(name) or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                to = site / file
                to.parent.mkdir(parents=True, exist_ok=True)
                to.symlink_to(file.locate())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of the source distribution, as a package index has it."""
    directory = tmp_path_factory.mktemp("source")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(directory)]
    subprocess.run(command, cwd=CLIENT, capture_output=True, check=True, timeout=120)
    (source,) = directory.iterdir()
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment's interpreter, with the wheel, grpcio and protobuf."""
    directory = tmp_path_factory.mktemp("alone")
    venv.create(directory, with_pip=False)
    python = directory / "bin/python"
    link_needed(next(directory.glob("lib/python*/site-packages")))
    # Without --no-deps: pip finds that what the wheel requires is there.
    pip("--python", python, "install", "--no-index", wheel)
    pip("--python", python, "check")
    return python


def test_the_wheel_is_small_and_leaves_the_users_names_alone(wheel: Path) -> None:
    assert wheel.stat().st_size < 150_000
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
    assert {top for top in tops if not top.endswith(".dist-info")} == {"octavo"}
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert sorted(line.split()[1].partition("<")[0].partition(">")[0] for line in required) == ["grpcio", "protobuf"]


async def test_it_streams_attaches_and_is_told_of_errors_in_an_empty_environment(alone: Path, tmp_path: Path) -> None:
    fake = FakeScheduler(socket_address(tmp_path, "one"))
    async with running_schedulers(fake), running_router([fake.address]) as (server, _):
        await server.wait_ready()
        target = f"127.0.0.1:{server.port}"
        # -I: neither the working directory nor PYTHONPATH lends it a module.
        child = await asyncio.create_subprocess_exec(
            str(alone), "-I", "-c", PROGRAM, target, stdout=subprocess.PIPE, cwd=tmp_path
        )
        printed, _ = await asyncio.wait_for(child.communicate(), 60)
        assert child.returncode == 0
        told = json.loads(printed)
        async with AsyncClient(target) as client:
            own = await client.generate("Once upon", SamplingParams(max_tokens=12, seed=3, n=2))
    assert told["heavy"] == []
    assert not [path for path in told["path"] if path.startswith(str(ROOT))]
    assert told["texts"] == [choice.text for choice in own.choices]
    assert told["token_ids"] == [list(choice.token_ids) for choice in own.choices]
