"""Asks every router process for streams of every other one: Cancel, Explain, Migrate and Attach must find them all.

    python -m benchmarks.faults.clients.found [--json]                a minute or two

`octavo up` with two routers of two processes each, and two replicas of SmolLM2. For each pair of a process that has a
stream and one that is asked, and for each call, a stream begins anew: it runs with its reader, or is held without one.
Then one process gets SIGTERM and drains, with a stream for each call and each of the others, which are asked. Prints a
table of calls and states: how many were found, of how many. Exits with 1 if one was not.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from octavo.client.connection import CHANNEL_OPTIONS
from protos import admin_pb2
from protos import inference_pb2 as pb
from protos.admin_pb2_grpc import AdminStub
from protos.inference_pb2_grpc import InferenceStub
from tests.support.ports import free_ports
from tests.support.up import Up

NUM_ROUTERS, NUM_PROCESSES = 2, 2
STATES = ("running", "held", "draining")
_FLAGS = (
    f"--num-routers={NUM_ROUTERS}", f"--api-server-count={NUM_PROCESSES}", "--data-parallel-size=2",
    "--worker-threads=1", "--drain-timeout=60",
)  # fmt: skip
# So many connections find both processes at a port, but for one in a million.
_MOST_CONNECTIONS = 30
_OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
_CALL_S, _STOPPED_S = 30.0, 2.0


class Door:
    """A connection to one router process."""

    def __init__(self, name: str, channel: grpc.aio.Channel) -> None:
        self.name = name
        # The generated stubs' types are those of synchronous channels.
        self.inference: Any = InferenceStub(channel)
        self.admin: Any = AdminStub(channel)


class Live:
    """A stream that has begun at a door, and goes on without its reader."""

    def __init__(self, door: Door, request_id: str) -> None:
        self.request_id, self._door = request_id, door
        sampling = pb.SamplingParams(max_tokens=4000, ignore_eos=True, seed=1)
        self._call = door.inference.Generate(
            pb.GenerateRequest(request_id=request_id, prompt="Once upon a time", sampling=sampling, detach_timeout=120)
        )

    async def begin(self, *, is_held: bool) -> "Live":
        await _read_tokens(self._call, 3)
        if is_held:
            self._call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._call.code()
        return self

    async def end(self) -> None:
        await self._door.inference.Cancel(pb.CancelRequest(request_id=self.request_id), timeout=_CALL_S)
        self._call.cancel()


async def _read_tokens(call: Any, count: int) -> None:
    """Raises AioRpcError, and AssertionError if the stream ends before."""
    async with asyncio.timeout(_CALL_S):
        while count > 0:
            message = await call.read()
            assert message is not grpc.aio.EOF, "the stream has ended"  # type: ignore[attr-defined]
            count -= len(message.chunk.token_ids)


async def _cancel(door: Door, request_id: str) -> bool:
    return (await door.inference.Cancel(pb.CancelRequest(request_id=request_id), timeout=_CALL_S)).cancelled


async def _explain(door: Door, request_id: str) -> bool:
    answer = await door.admin.Explain(admin_pb2.ExplainRequest(request_id=request_id), timeout=_CALL_S)
    return any(timeline.request_id == request_id for timeline in answer.timelines)


async def _migrate(door: Door, request_id: str) -> bool:
    moved = await door.admin.Migrate(admin_pb2.MigrateRequest(request_id=request_id), timeout=_CALL_S)
    return moved.moved_from != moved.moved_to


async def _attach(door: Door, request_id: str) -> bool:
    call = door.inference.Attach(pb.AttachRequest(request_id=request_id))
    await _read_tokens(call, 3)
    call.cancel()
    return True


CALLS: dict[str, Callable[[Door, str], Awaitable[bool]]] = {
    "Cancel": _cancel, "Explain": _explain, "Migrate": _migrate, "Attach": _attach
}  # fmt: skip


class Table:
    def __init__(self) -> None:
        self._found = {(call, state): [0, 0] for call in CALLS for state in STATES}
        self.failures: list[str] = []

    async def ask(self, call: str, state: str, home: Door, door: Door, live: Live) -> None:
        """Makes a call at a door about a stream whose home is another one, or the same."""
        cell = self._found[call, state]
        cell[1] += 1
        try:
            if is_found := await CALLS[call](door, live.request_id):
                cell[0] += 1
            why = "" if is_found else "not found"
        except (grpc.aio.AioRpcError, AssertionError, TimeoutError) as error:
            why = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else repr(error)
        if why:
            self.failures.append(f"{call} at {door.name}, a {state} stream of {home.name}: {why}")

    @property
    def as_json(self) -> dict[str, dict[str, str]]:
        return {call: {state: "{}/{}".format(*self._found[call, state]) for state in STATES} for call in CALLS}

    def __str__(self) -> str:
        lines = ["        " + "".join(f"{state:>10}" for state in STATES)]
        lines += [f"{call:8}" + "".join(f"{cell:>10}" for cell in row.values()) for call, row in self.as_json.items()]
        return "\n".join([*lines, *self.failures])


@contextlib.asynccontextmanager
async def _doors(ports: Sequence[int]) -> AsyncIterator[list[Door]]:
    """Connections to all processes: which one answers at a shared port, the kernel chooses."""
    async with contextlib.AsyncExitStack() as open_channels:
        doors = []
        for router, port in enumerate(ports):
            found: dict[str, Door] = {}
            for _ in range(_MOST_CONNECTIONS):
                options = [*CHANNEL_OPTIONS, _OWN_CONNECTION]
                channel = await open_channels.enter_async_context(
                    grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
                )
                door = Door(f"router {router}.{'ab'[min(len(found), 1)]}", channel)
                answer = await door.admin.Observe(admin_pb2.ObserveRequest(), timeout=_CALL_S)
                found.setdefault(answer.router.router_id, door)
                if len(found) == NUM_PROCESSES:
                    break
            assert len(found) == NUM_PROCESSES, f"port {port}: only {len(found)} of {NUM_PROCESSES} processes answer"
            doors += found.values()
        yield doors


async def _door_of(process: psutil.Process, doors: Sequence[Door]) -> Door:
    """Returns the connection that a process has: that which is silent while the process is stopped."""
    process.suspend()
    try:
        for door in doors:
            try:
                await door.admin.Observe(admin_pb2.ObserveRequest(), timeout=_STOPPED_S)
            except grpc.aio.AioRpcError:
                return door
    finally:
        process.resume()
    raise AssertionError(f"{process}: no connection leads to it")


async def _run(up: Up, ports: Sequence[int]) -> Table:
    table, number = Table(), 0
    async with _doors(ports) as doors:
        for state in STATES[:2]:
            for home in doors:
                for door in doors:
                    for call in CALLS:
                        number += 1
                        live = await Live(home, f"stream-{number}").begin(is_held=state == "held")
                        await table.ask(call, state, home, door, live)
                        await live.end()
        process = up.children_of("router")[0]
        home = await _door_of(process, doors)
        asked = [(door, call) for door in doors if door is not home for call in CALLS]
        lives = [Live(home, f"draining-{place}") for place in range(len(asked))]
        for place, live in enumerate(lives):
            await live.begin(is_held=bool(place % 2))
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(up.wait_for, f"draining: {len(lives)} streams")
        for (door, call), live in zip(asked, lives, strict=True):
            await table.ask(call, "draining", home, door, live)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a line")
    arguments = parser.parse_args()
    port = free_ports(NUM_ROUTERS)
    with tempfile.TemporaryDirectory() as directory, Up(Path(directory), *_FLAGS, real=True, port=port) as up:
        up.wait_for("serving; Ctrl-C to stop")
        up.wait_for("ready for epoch", count=2)
        table = asyncio.run(_run(up, range(port, port + NUM_ROUTERS)))
    print(json.dumps({**table.as_json, "failures": table.failures}) if arguments.json else table)
    return int(bool(table.failures))


if __name__ == "__main__":
    sys.exit(main())
