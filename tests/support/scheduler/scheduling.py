"""A scheduler in this process, fake workers, and the router's end of a Session, for tests over real sockets."""

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import grpc
import grpc.aio

from configs.options import Options
from protos import inference_pb2, scheduler_pb2
from protos.scheduler_pb2_grpc import SchedulerStub
from runtime.wire import PROTOCOL_VERSION, SESSION_MESSAGE_BYTES
from scheduler.server import SchedulerServer
from tests.fakes.worker import FakeWorker
from tests.support.repository import ROOT
from tests.support.up import environment

TIMEOUT = 60.0
Key = tuple[int, int]


def make_options(directory: Path, **changes: object) -> Options:
    fields: dict[str, object] = {
        "served_model_name": "hashes",
        "runtime_dir": directory / "run",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "block_size": 8,
        "metrics_port": 0,
        "drain_timeout": 20.0,
    }
    return Options(**(fields | changes))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def running_scheduler(options: Options, replica: int = 0, **settings: int) -> AsyncIterator[SchedulerServer]:
    server = SchedulerServer(options, replica, **settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def running_worker(options: Options, **settings) -> AsyncIterator[FakeWorker]:
    """Runs a fake worker. Asserts at the end that no plan broke a promise of the wire."""
    worker = FakeWorker(options, **settings).start()
    try:
        yield worker
    finally:
        await asyncio.to_thread(worker.stop)
    assert not worker.runner.violations


@contextlib.contextmanager
def worker_process(options: Options, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A fake worker that can be killed."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.fakes.worker",
            f"--runtime-dir={options.runtime_dir}",
            f"--max-num-seqs={options.max_num_seqs}",
            f"--max-num-batched-tokens={options.max_num_batched_tokens}",
            f"--block-size={options.block_size}",
            f"--served-model-name={options.served_model_name}",
            f"--tensor-parallel-size={options.tensor_parallel_size}",
            *flags,
        ],
        cwd=ROOT,
        env=environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Gate:
    """Holds a worker before each step from `first` on, until opened; sets `reached` when one arrives."""

    def __init__(self, first: int = 1) -> None:
        self.first = first
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, plan) -> None:
        if plan.step >= self.first:
            self.reached.set()
            assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()


class RouterEnd:
    """A router's end of a Session: submits requests, keeps what comes back and asserts that its columns fit."""

    def __init__(self, address: str, *, watch_cache: bool = False) -> None:
        self._watch_cache = watch_cache
        # As little as a router has under way (router.replicas.connection).
        window = [("grpc.http2.lookahead_bytes", 8 * 1024), ("grpc.http2.bdp_probe", 0)]
        self._channel = grpc.aio.insecure_channel(
            address, options=[("grpc.max_receive_message_length", SESSION_MESSAGE_BYTES), *window]
        )
        # Cleared: reads nothing.
        self.reading = asyncio.Event()
        self.reading.set()
        # Tokens of sequences in one message, at most.
        self.most_entries = 0
        self._changed = asyncio.Condition()
        self._groups = 0
        self._logprob_groups: set[int] = set()
        self.welcomes: list[scheduler_pb2.Welcome] = []
        self.loads: list[scheduler_pb2.Load] = []
        self.rejected: dict[int, scheduler_pb2.Rejected] = {}
        self.tokens: dict[Key, list[int]] = {}
        self.logprobs: dict[Key, list[inference_pb2.TokenLogprobs]] = {}
        self.prompt_logprobs: dict[Key, list[inference_pb2.PromptLogprobs]] = {}
        self.finishes: dict[Key, scheduler_pb2.SequenceFinish] = {}
        self.cache_events: list[scheduler_pb2.CacheEvent] = []
        self.wanted_items: list[bytes] = []
        self.status: tuple[grpc.StatusCode, str] | None = None
        self.error: BaseException | None = None

    async def __aenter__(self) -> "RouterEnd":
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self, protocol_version: int = PROTOCOL_VERSION) -> None:
        self._call = SchedulerStub(self._channel).Session(wait_for_ready=True)
        message = scheduler_pb2.Open(protocol_version=protocol_version, router_id="test", watch_cache=self._watch_cache)
        await self.send(scheduler_pb2.RouterMessage(open=message))
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()
        if self.error is not None:
            raise self.error

    async def send(self, message: scheduler_pb2.RouterMessage) -> None:
        await self._call.write(message)

    async def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int | None = 8,
        choices: Sequence[int | tuple[int, Sequence[int]]] = (0,),
        request_id: str = "",
        attempt: int = 0,
        seed: int = 0,
        deadline: float = 0.0,
        priority: int = 0,
        part: int | None = None,
        items: Sequence[inference_pb2.ItemSpan] = (),
        **sampling,
    ) -> int:
        """Waits for the Welcome, as routers do. Returns the group.

        choices: indexes, or (index, output so far). deadline: in seconds. part: tokens in the first message.
        """
        await self.wait_for(lambda: self.welcomes)
        self._groups += 1
        group = self._groups
        starts = [(choice, ()) if isinstance(choice, int) else choice for choice in choices]
        for choice, output in starts:
            self.tokens[group, choice] = list(output)
        if "logprobs" in sampling:
            self._logprob_groups.add(group)
        submit = scheduler_pb2.Submit(
            group=group,
            request_id=request_id or f"request-{id(self)}-{group}",
            attempt=attempt,
            num_prompt_tokens=len(prompt),
            prompt_token_ids=prompt[:part],
            sampling=inference_pb2.SamplingParams(max_tokens=max_tokens, seed=seed, **sampling),
            choices=[scheduler_pb2.SequenceStart(choice=choice, output_token_ids=ids) for choice, ids in starts],
            timeout=deadline,
            priority=priority,
            items=items,
        )
        await self.send(scheduler_pb2.RouterMessage(submit=submit))
        return group

    async def send_part(self, group: int, token_ids: Sequence[int]) -> None:
        part = scheduler_pb2.PromptPart(group=group, prompt_token_ids=token_ids)
        await self.send(scheduler_pb2.RouterMessage(prompt_part=part))

    async def send_item(self, name: bytes, data: bytes, *, part_bytes: int = 2**19) -> None:
        for start in range(0, len(data), part_bytes):
            part = scheduler_pb2.ItemPart(name=name, num_bytes=len(data), data=data[start : start + part_bytes])
            await self.send(scheduler_pb2.RouterMessage(item_part=part))

    async def cancel(
        self, group: int, *choices: int, reason: scheduler_pb2.CancelReason = scheduler_pb2.CANCEL_REASON_CLIENT
    ) -> None:
        message = scheduler_pb2.CancelSequences(group=group, choices=choices, reason=reason)
        await self.send(scheduler_pb2.RouterMessage(cancel=message))

    async def wait_for(self, condition: Callable[[], object]) -> None:
        """Waits until the condition holds; checks it after each message."""
        async with asyncio.timeout(TIMEOUT), self._changed:
            await self._changed.wait_for(lambda: condition() or self.error or self.status)
        if self.error is not None:
            raise self.error
        assert condition(), f"the Session has ended: {self.status}"

    async def pause(self, mode: scheduler_pb2.PauseMode) -> None:
        """Pauses the replica for all its routers, or lets it go on."""
        await SchedulerStub(self._channel).Pause(scheduler_pb2.PauseRequest(mode=mode))

    async def wait_taken(self) -> None:
        """Waits until the scheduler has taken all that was submitted here."""
        await self.wait_for(lambda: self.loads and self.loads[-1].last_group >= self._groups)

    async def finish(self, group: int, choice: int = 0) -> scheduler_pb2.SequenceFinish:
        await self.wait_for(lambda: (group, choice) in self.finishes or group in self.rejected)
        assert group not in self.rejected, self.rejected[group]
        return self.finishes[group, choice]

    async def rejection(self, group: int) -> scheduler_pb2.Rejected:
        await self.wait_for(lambda: group in self.rejected)
        return self.rejected[group]

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """Waits for the Session to end; returns its status."""
        await self.wait_for(lambda: self.status)
        assert self.status is not None
        return self.status

    async def wait_idle(self) -> scheduler_pb2.Load:
        """Waits until nothing runs or waits, and the load reflects all that was submitted here."""

        def is_idle() -> bool:
            load = self.loads[-1] if self.loads else None
            return load is not None and load.last_group >= self._groups and not load.num_running + load.num_waiting

        await self.wait_for(is_idle)
        return self.loads[-1]

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                self.most_entries = max(self.most_entries, len(message.outputs.groups))
                self._take(message)
                await self._notify()
                await self.reading.wait()
            self.status = await self._call.code(), await self._call.details()
        except grpc.aio.AioRpcError as error:
            self.status = error.code(), error.details() or ""
        except (AssertionError, KeyError, ValueError) as error:
            self.error = error
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _take(self, message: scheduler_pb2.SchedulerMessage) -> None:
        assert message.ByteSize() <= SESSION_MESSAGE_BYTES
        if message.HasField("welcome"):
            self.welcomes.append(message.welcome)
        assert self.welcomes, "the first message is no Welcome"
        if message.HasField("load"):
            self.loads.append(message.load)
        for rejected in message.rejected:
            self.rejected[rejected.group] = rejected
        for sent in message.prompt_logprobs:
            assert not self.tokens[sent.group, sent.choice], "prompt logprobs after output"
            self.prompt_logprobs.setdefault((sent.group, sent.choice), []).append(sent.frame)
        self.cache_events += message.cache_events
        self.wanted_items += message.wanted_items
        self._take_outputs(message.outputs)

    def _take_outputs(self, outputs: scheduler_pb2.StepOutputs) -> None:
        token_ids, logprobs = list(outputs.token_ids), list(outputs.logprobs)
        columns = zip(outputs.groups, outputs.choices, outputs.first_tokens, outputs.num_tokens, strict=True)
        for group, choice, first, count in columns:
            key, tokens = (group, choice), self.tokens[group, choice]
            assert key not in self.finishes, f"{key}: tokens after its end"
            assert first == len(tokens), f"{key}: token {first} follows {len(tokens)}"
            tokens += token_ids[:count]
            del token_ids[:count]
            if group in self._logprob_groups:
                self.logprobs.setdefault(key, []).extend(logprobs[:count])
                del logprobs[:count]
        assert not token_ids
        assert not logprobs
        for finish in outputs.finishes:
            assert (finish.group, finish.choice) not in self.finishes, "two ends"
            self.finishes[finish.group, finish.choice] = finish
