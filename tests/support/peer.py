"""A worker's end of the step wire, scripted by a test."""

import asyncio
from pathlib import Path

import zmq

from protos import inference_pb2, step_pb2
from runtime.security.curve import client_curve
from runtime.wire import PROTOCOL_VERSION, octavo_version
from tests.support.scheduler.scheduling import TIMEOUT


class Peer:
    """A scripted rank: sends only the messages that a test asks for."""

    def __init__(self, endpoint: str, identity: bytes, curve_dir: Path | None = None) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, int(TIMEOUT * 1000))
        if curve_dir is not None:
            client_curve(self.socket, curve_dir)
        self.socket.connect(endpoint)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()

    def say_hello(self, instance: int = 1, *, rank: int = 0, world_size: int = 1) -> None:
        hello = step_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            octavo_version=octavo_version(),
            rank=rank,
            world_size=world_size,
            model="hashes",
            block_size=8,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            instance=instance,
        )
        self.send(step_pb2.WorkerToScheduler(hello=hello))

    def say_ready(self, epoch: int, model: inference_pb2.ModelInfo, *, rank: int = 0) -> None:
        self.send(step_pb2.WorkerToScheduler(ready=step_pb2.Ready(epoch=epoch, rank=rank, model=model)))

    def send(self, message: step_pb2.WorkerToScheduler) -> None:
        self.socket.send(message.SerializeToString())

    async def expect(self, kind: str):
        """Returns the next message of this kind and skips others."""
        for _ in range(50):
            assert await asyncio.to_thread(self.socket.poll, int(TIMEOUT * 1000)), f"no {kind} came"
            message = step_pb2.SchedulerToWorker.FromString(self.socket.recv())
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)
        raise AssertionError(f"no {kind} among 50 messages")
