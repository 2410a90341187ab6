"""Installs octavo-client alone in an empty environment, and runs it and the programs of docs/clients through kill -9.

    python -m benchmarks.faults.clients                              everything: 4 minutes, more where Go must compile
    python -m benchmarks.faults.clients --programs python,node       some of: octavo python node cpp go
    python -m benchmarks.faults.clients --programs "" --json         octavo-client alone
    python -m benchmarks.faults.clients --no-suite                   the programs alone

`octavo up` with two routers and two replicas of SmolLM2. Prints the size of the wheel and of what is installed with it,
seconds and CPU seconds of `pip install`, then a line for each check of suite.py: all that the client does, and streams
that live while a router, a scheduler or a worker is killed. Then each program is compiled, streams, loses the router it
prefers to kill -9 once output has come, and must print the text of an undisturbed stream to its end. Languages whose
tools the machine lacks are left out, and named. Exits with 1 if anything is not as it should be.
"""

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cluster.foreign_clients import CLIENTS, PROGRAMS, LackingError, environments
from benchmarks.faults.cluster import Cluster, Kind, Place, until
from benchmarks.faults.command import NUM_REPLICAS, NUM_ROUTERS
from benchmarks.faults.streams.structured.plans import TOOL_FLAGS
from octavo import Client, SamplingParams
from tests.support.repository import ROOT

SUITE = Path(__file__).with_name("suite.py")
# With octavo-client; the others know nothing but the .proto file.
_OWN = "octavo"
_PROMPT, _MAX_TOKENS, _SEED = "Once upon a time, in a small town by the sea,", 160, 7
_PATIENCE_S = 150.0
_FLAGS = ("--worker-threads=1", "--kv-cache-memory=0.2", "--max-num-seqs=32", "--max-restarts=1000", *TOOL_FLAGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A check, or a program. seconds: of the check; of a program's compilation."""

    name: str
    is_right: bool
    seconds: float = 0.0
    told: str = ""


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


class Bench:
    def __init__(self, cluster: Cluster, python: Path, *, as_json: bool) -> None:
        self._cluster, self._python, self._as_json = cluster, python, as_json
        self._outcomes: list[Outcome] = []

    @property
    def is_right(self) -> bool:
        return bool(self._outcomes) and all(outcome.is_right for outcome in self._outcomes)

    async def run_suite(self) -> None:
        """Runs suite.py in the environment; kills what it asks for."""
        targets = ",".join(self._cluster.targets)
        # -I: neither the working directory nor PYTHONPATH lends it a module.
        process = await asyncio.create_subprocess_exec(
            str(self._python), "-I", str(SUITE), targets, stdin=PIPE, stdout=PIPE, cwd="/"
        )
        assert process.stdin is not None
        try:
            while line := await _line(process):
                word, _, rest = line.partition(" ")
                if word == "kill":
                    await self._kill(Kind(rest.split()[0]), int(rest.split()[1]))
                    process.stdin.write(b"\n")
                elif word == "ok":
                    name, _, seconds = rest.rpartition(" ")
                    self._tell(Outcome(name=name, is_right=True, seconds=float(seconds)))
                    await self._all_serve()
                else:
                    self._tell(Outcome(name=rest, is_right=False))
                    await self._all_serve()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def run_program(self, name: str) -> None:
        """Runs a program of docs/clients whose router is killed in mid-stream."""
        began = time.monotonic()
        try:
            command = await asyncio.to_thread(self._command, name)
        except LackingError as lacking:
            self._tell(Outcome(name=name, is_right=True, told=f"left out: {lacking}"))
            return
        except subprocess.CalledProcessError as error:
            why = (error.stderr or error.stdout or "").strip()[-400:]
            self._tell(Outcome(name=name, is_right=False, told=f"not compiled: {why}"))
            return
        seconds = time.monotonic() - began
        expected = await asyncio.to_thread(self._undisturbed)
        before = await self._num_requests_of_last_router()
        targets = ",".join(self._cluster.targets)
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
        is_right = process.returncode == 0 and (begun + rest).decode().strip("\n") == expected.strip("\n")
        told = "" if is_right else f"exit code {process.returncode}, {begun + rest!r} {said[-300:]!r}"
        if is_right and await self._num_requests_of_last_router() == before:
            is_right, told = False, "the kill came too late: the stream did not go on at the other router"
        self._tell(Outcome(name=name, is_right=is_right, seconds=seconds, told=told))
        await self._all_serve()

    def _command(self, name: str) -> list[object]:
        if name == _OWN:
            return [self._python, CLIENTS / "python" / "with_octavo.py"]
        directory = environments() / name
        directory.mkdir(parents=True, exist_ok=True)
        return PROGRAMS[name](directory)

    def _undisturbed(self) -> str:
        with Client(self._cluster.targets) as client:
            return client.generate(_PROMPT, SamplingParams(max_tokens=_MAX_TOKENS, seed=_SEED)).text

    async def _num_requests_of_last_router(self) -> float:
        samples = await self._cluster.samples(Place(Kind.ROUTER, NUM_ROUTERS - 1))
        assert samples is not None, "the router does not answer"
        return sum(value for (name, _), value in samples.items() if name == "octavo_requests_total")

    async def _kill(self, kind: Kind, number: int) -> None:
        await asyncio.to_thread(self._cluster.kill, [Place(kind, number)])

    async def _all_serve(self) -> None:
        cluster = self._cluster

        async def is_back() -> bool:
            healthy = [await cluster.is_healthy(place) for place in cluster.places(Kind.ROUTER)]
            return all(healthy) and all([await cluster.is_ready(replica) for replica in range(NUM_REPLICAS)])

        await until(is_back, "readiness of all processes")

    def _tell(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        if self._as_json:
            print(json.dumps(asdict(outcome)), flush=True)
            return
        word = "ok    " if outcome.is_right else "FAILED"
        print(
            f"{word} {outcome.seconds:6.1f} s  {outcome.name}{': ' if outcome.told else ''}{outcome.told}", flush=True
        )


async def _line(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(_PATIENCE_S):
        return (await process.stdout.readline()).decode().rstrip("\n")


async def _run(bench: Bench, programs: Sequence[str], *, has_suite: bool) -> None:
    if has_suite:
        await bench.run_suite()
    for name in programs:
        await bench.run_program(name)


def main() -> int:
    names = (_OWN, *PROGRAMS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(names), help="comma-separated; default: %(default)s")
    parser.add_argument("--no-suite", action="store_true", help="leave the checks of octavo-client out")
    parser.add_argument("--json", action="store_true", help="a line for each result")
    arguments = parser.parse_args()
    chosen = list(filter(None, arguments.programs.split(",")))
    if unknown := set(chosen) - set(names):
        parser.error(f"--programs: {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        python, installed = install(directory)
        row = {name: round(value, 1) for name, value in asdict(installed).items()}
        print(json.dumps(row) if arguments.json else "  ".join(f"{name} {value}" for name, value in row.items()))
        with Cluster(directory, *_FLAGS, num_replicas=NUM_REPLICAS, num_stages=1, num_routers=NUM_ROUTERS) as cluster:
            cluster.wait_until_all_serve()
            bench = Bench(cluster, python, as_json=arguments.json)
            asyncio.run(_run(bench, chosen, has_suite=not arguments.no_suite))
    return int(not bench.is_right)


if __name__ == "__main__":
    sys.exit(main())
