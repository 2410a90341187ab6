"""A worker's loop on a thread of the test process."""

import threading
from collections.abc import Callable

import zmq

from protos import step_pb2
from runtime.wire import heartbeat_endpoint
from worker.process.link import Link, Wakeup
from worker.process.loop import WorkerLoop
from worker.process.status import HeartbeatThread, WorkerMetrics, WorkerStatus
from worker.step.runner import StepRunner

HELLO = step_pb2.Hello(protocol_version=1, world_size=1, model="fake", instance=42)


class RunningWorker:
    """A worker's loop that runs until it ends by itself or until `stop`."""

    def __init__(
        self, endpoint: str, build: Callable[[Callable[[float], None]], StepRunner], *, timeout: float = 30.0
    ) -> None:
        """build: see WorkerLoop. timeout: seconds for which the scheduler may be silent."""
        self.endpoint = endpoint
        self.status, self.wakeup = WorkerStatus(), Wakeup()
        self.metrics = WorkerMetrics(self.status.snapshot)
        self._build, self._timeout = build, timeout
        self._exit_codes: list[int] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def exit_code(self) -> int:
        """Waits until the loop ends by itself."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._exit_codes[0]

    def stop(self) -> None:
        self.wakeup.request_stop()
        self._thread.join(60)
        self.wakeup.close()

    def _run(self) -> None:
        with zmq.Context() as context:
            link = Link(context, self.endpoint, None, timeout=self._timeout)
            heartbeat = HeartbeatThread(
                context,
                heartbeat_endpoint(self.endpoint),
                None,
                self.status,
                rank=0,
                instance=42,
                timeout=self._timeout,
                on_loss=self.wakeup.notify,
            )
            heartbeat.start()
            loop = WorkerLoop(
                hello=HELLO,
                link=link,
                heartbeat=heartbeat,
                status=self.status,
                wakeup=self.wakeup,
                metrics=self.metrics,
                build=self._build,
            )
            try:
                self._exit_codes.append(loop.run())
            finally:
                heartbeat.stop()
                link.close(deliver=True)
