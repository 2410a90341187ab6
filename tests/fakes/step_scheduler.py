"""The scheduler's end of the step wire, driven by a test over real sockets, without scheduling."""

import threading
from pathlib import Path

import zmq

from protos import step_pb2
from runtime.security.curve import server_curve, start_authenticator
from runtime.wire import heartbeat_endpoint, plan_digest, rank_identity

_TIMEOUT_MS = 60_000


class HeartbeatAnswers(threading.Thread):
    """Answers heartbeats with `instance`; keeps the last one received."""

    def __init__(self, context: zmq.Context, endpoint: str, instance: int, curve_dir: Path | None) -> None:
        super().__init__(name="fake-heartbeats", daemon=True)
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if curve_dir is not None:
            server_curve(self._socket, curve_dir)
        self._socket.bind(endpoint)
        self._instance = instance
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._silent = False
        self.received: list[step_pb2.Heartbeat] = []

    def set_silent(self, silent: bool) -> None:
        self._silent = silent

    def wait_for(self, condition, timeout: float = 60.0) -> step_pb2.Heartbeat:
        """Waits for a heartbeat for which condition holds, which may have come before; returns the first."""
        with self._changed:
            found = self._changed.wait_for(lambda: [beat for beat in self.received if condition(beat)], timeout)
        assert found, f"no such heartbeat; the last was {self.received[-1:]}"
        return found[0]

    def end(self) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        try:
            while not self._ended.is_set():
                if not self._socket.poll(20):
                    continue
                identity, payload = self._socket.recv_multipart()
                with self._changed:
                    self.received.append(step_pb2.Heartbeat.FromString(payload))
                    self._changed.notify_all()
                if not self._silent:
                    answer = step_pb2.Heartbeat(instance=self._instance)
                    self._socket.send_multipart([identity, answer.SerializeToString()])
        finally:
            self._socket.close()


class StepScheduler:
    """One scheduler process, as its worker sees it."""

    def __init__(self, endpoint: str, *, instance: int = 1, curve_dir: Path | None = None) -> None:
        self._context = zmq.Context()
        self._authenticator = start_authenticator(self._context, curve_dir) if curve_dir else None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if curve_dir is not None:
            server_curve(self._socket, curve_dir)
        self._socket.bind(endpoint)
        self.heartbeats = HeartbeatAnswers(self._context, heartbeat_endpoint(endpoint), instance, curve_dir)
        self.heartbeats.start()
        self._instance = instance
        self._digest = b""
        self._step = 0
        self.epoch = 0

    def __enter__(self) -> "StepScheduler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.heartbeats.end()
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def receive(self) -> tuple[bytes, step_pb2.WorkerToScheduler]:
        """(identity, message) of the next message."""
        assert self._socket.poll(_TIMEOUT_MS), "the worker sends nothing"
        identity, payload = self._socket.recv_multipart()
        return identity, step_pb2.WorkerToScheduler.FromString(payload)

    def expect(self, kind: str):
        """The next message, which must be of this kind."""
        _, message = self.receive()
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    def expect_hello(self) -> tuple[bytes, step_pb2.Hello]:
        identity, message = self.receive()
        assert message.WhichOneof("message") == "hello", message
        return identity, message.hello

    def send(self, message: step_pb2.SchedulerToWorker | bytes, identity: bytes | None = None, *more: bytes) -> None:
        """Sends to rank 0 of the epoch, unless an identity is given."""
        payload = message if isinstance(message, bytes) else message.SerializeToString()
        self._socket.send_multipart([identity or rank_identity(self.epoch, 0), payload, *more])

    def reset(self, epoch: int, identity: bytes | None = None) -> step_pb2.Ready:
        """Begins an epoch and waits for Ready. identity: of a rank that sent Hello; None: rank 0 of the last epoch."""
        self.send_reset(epoch, identity)
        self.epoch, self._step, self._digest = epoch, 0, b""
        sender, message = self.receive()
        assert message.WhichOneof("message") == "ready", message
        assert sender == rank_identity(epoch, 0)
        return message.ready

    def send_reset(self, epoch: int, identity: bytes | None = None, *, rendezvous: str = "") -> None:
        reset = step_pb2.Reset(epoch=epoch, rendezvous=rendezvous, scheduler=self._instance)
        self.send(step_pb2.SchedulerToWorker(reset=reset), identity)

    def join(self, epoch: int = 1) -> step_pb2.Ready:
        identity, _ = self.expect_hello()
        return self.reset(epoch, identity)

    def send_plan(self, plan: step_pb2.StepPlan, **changes: object) -> None:
        """Sends a plan with the right epoch, step and digest, except for `changes`."""
        self._step += 1
        message = step_pb2.SchedulerToWorker(plan=plan)
        message.plan.epoch, message.plan.step, message.plan.previous_digest = self.epoch, self._step, self._digest
        for name, value in changes.items():
            setattr(message.plan, name, value)
        payload = message.SerializeToString()
        self._digest = plan_digest(payload)
        self.send(payload)

    def step(self, plan: step_pb2.StepPlan) -> step_pb2.StepResult:
        self.send_plan(plan)
        return self.expect("result")
