"""Installs octavo-client alone in an empty environment, and runs it and the programs of docs/clients through kill -9.

Prints the size of the wheel and of what is installed with it, seconds and CPU seconds of `pip install`, then a line for
each check of client_suite.py: all that the client does, and streams that live while a router, a scheduler or a worker
is killed. Then each program is compiled, streams, loses the router it prefers to kill -9 once output has come, and must
print the text of an undisturbed stream to its end. Languages whose tools the machine lacks are left out, and named.
Takes 4 minutes, more where Go must compile.
"""

import asyncio
import resource
import subprocess
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cluster.foreign_clients import CLIENTS, PROGRAMS, LackingError, environments
from benchmarks.faults.cluster import Kind, Place
from benchmarks.faults.driver import Hit, Say, Traffic
from benchmarks.faults.ground import TOOL_FLAGS, Ground
from octavo import Client, SamplingParams
from tests.support.repository import ROOT

SUITE = Path(__file__).with_name("client_suite.py")
# With octavo-client; the others know nothing but the .proto file.
_OWN = "octavo"
# The checks of octavo-client.
_SUITE = "suite"
NAMES = (_SUITE, _OWN, *PROGRAMS)
PROGRAM_FLAGS = (
    *("--worker-threads=1", "--kv-cache-memory=0.2", "--max-num-seqs=32", "--max-restarts=1000"),
    *TOOL_FLAGS,
)
_PROMPT, _MAX_TOKENS, _SEED = "Once upon a time, in a small town by the sea,", 160, 7
_PATIENCE_S = 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """octavo-client in an environment of its own. mib: with grpcio and protobuf, without pip."""

    wheel_kb: float
    mib: float
    seconds: float
    cpu_seconds: float


def install(directory: Path) -> tuple[Path, Installed]:
    """Builds the wheel, and installs it in an empty environment. Returns the environment's interpreter."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", directory]
    subprocess.run([*map(str, build), str(ROOT / "clients" / "python")], check=True)
    wheel = next(directory.glob("octavo_client-*.whl"))
    subprocess.run([sys.executable, "-m", "venv", str(directory / "venv")], check=True)
    python = directory / "venv" / "bin" / "python"
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    site = next(directory.glob("venv/lib/python*/site-packages"))
    files = [
        each for each in site.rglob("*") if each.is_file() and not each.relative_to(site).parts[0].startswith("pip")
    ]
    return python, Installed(
        wheel_kb=wheel.stat().st_size / 1000,
        mib=sum(each.stat().st_size for each in files) / 2**20,
        seconds=seconds,
        cpu_seconds=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    )


class Programs(Traffic):
    """names: of programs, among NAMES."""

    def __init__(self, ground: Ground, say: Say, names: Sequence[str]) -> None:
        super().__init__(ground, say)
        self._names = names

    async def begin(self) -> None:
        self._python, installed = await asyncio.to_thread(install, self.ground.directory)
        self.figures = {name: round(value, 1) for name, value in asdict(installed).items()} | {"checks": {}}

    async def end(self, hits: Sequence[Hit]) -> None:
        for name in self._names:
            await (self._run_suite() if name == _SUITE else self._run_program(name))
        checks: dict[str, str] = self.figures["checks"]
        self.tables = [f"{name.replace('_', ' ')} {value}" for name, value in self.figures.items() if name != "checks"]
        self.tables += [f"{told:>12}  {name}" for name, told in checks.items()]

    async def _run_suite(self) -> None:
        """Runs client_suite.py in the environment; kills what it asks for."""
        targets = ",".join(self.cluster.targets)
        # -I: neither the working directory nor PYTHONPATH lends it a module.
        process = await asyncio.create_subprocess_exec(
            str(self._python), "-I", str(SUITE), targets, stdin=PIPE, stdout=PIPE, cwd="/"
        )
        assert process.stdin is not None
        try:
            while line := await _line(process):
                word, _, rest = line.partition(" ")
                if word == "kill":
                    kind, number = rest.split()
                    await self._kill(Kind(kind), int(number))
                    process.stdin.write(b"\n")
                    continue
                name, _, seconds = rest.rpartition(" ")
                await (self._tell(name, f"{seconds} s") if word == "ok" else self._tell(rest, wrong="FAILED"))
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _run_program(self, name: str) -> None:
        """Runs a program of docs/clients whose router is killed in mid-stream."""
        began = time.monotonic()
        try:
            command = await asyncio.to_thread(self._compiled, name)
        except LackingError as lacking:
            await self._tell(name, f"left out: {lacking}")
            return
        except subprocess.CalledProcessError as error:
            await self._tell(name, wrong=f"not compiled: {(error.stderr or error.stdout or '').strip()[-400:]}")
            return
        seconds = time.monotonic() - began
        expected = await asyncio.to_thread(self._undisturbed)
        before = await self._num_requests_of_last_router()
        targets = ",".join(self.cluster.targets)
        process = await asyncio.create_subprocess_exec(
            *map(str, command), targets, _PROMPT, str(_MAX_TOKENS), str(_SEED), stdout=PIPE, stderr=PIPE
        )
        try:
            async with asyncio.timeout(_PATIENCE_S):
                assert process.stdout is not None
                begun = await process.stdout.read(1)
                await self._kill(Kind.ROUTER, 0)
                rest, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        wrong = ""
        if process.returncode or (begun + rest).decode().strip("\n") != expected.strip("\n"):
            wrong = f"exit code {process.returncode}, {begun + rest!r} {said[-300:]!r}"
        elif await self._num_requests_of_last_router() == before:
            wrong = "the kill came too late: the stream did not go on at the other router"
        await self._tell(name, f"{seconds:.1f} s", wrong=wrong)

    def _compiled(self, name: str) -> list[object]:
        if name == _OWN:
            return [self._python, CLIENTS / "python" / "with_octavo.py"]
        directory = environments() / name
        directory.mkdir(parents=True, exist_ok=True)
        return PROGRAMS[name](directory)

    def _undisturbed(self) -> str:
        with Client(self.cluster.targets) as client:
            return client.generate(_PROMPT, SamplingParams(max_tokens=_MAX_TOKENS, seed=_SEED)).text

    async def _num_requests_of_last_router(self) -> float:
        samples = await self.cluster.samples(self.cluster.places(Kind.ROUTER)[-1])
        assert samples is not None, "the router does not answer"
        return sum(value for (name, _), value in samples.items() if name == "octavo_requests_total")

    async def _kill(self, kind: Kind, number: int) -> None:
        await asyncio.to_thread(self.cluster.kill, [Place(kind, number)])

    async def _tell(self, name: str, shown: str = "", *, wrong: str = "") -> None:
        """Notes how it went, and waits until all processes serve again."""
        self.figures["checks"][name] = wrong or shown
        self.say(f"{name}: {wrong or shown}")
        if wrong:
            self.problems.append(f"{name}: {wrong}")
        await self.ground.wait_until_serving(name)


async def _line(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(_PATIENCE_S):
        return (await process.stdout.readline()).decode().rstrip("\n")
