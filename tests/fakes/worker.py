"""A worker without weights that speaks the real step wire: the worker's own loop around a model of hashes.

As a process: python -m tests.fakes.worker -c FILE --replica I [--rank R] [any option] [--step-seconds S] [...].
"""

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from configs.flags import own_number, parse_flags
from configs.load import load_options
from configs.options import Options
from protos import step_pb2
from runtime.progress.page import ProgressPage
from runtime.progress.watchdog import Watchdog
from runtime.telemetry.logs import configure_logging
from runtime.wire import PROTOCOL_VERSION, heartbeat_endpoint, octavo_version
from tests.fakes.hash_runner import POISONS, HashModel, HashRunner
from tests.fakes.socket_group import meet
from worker.errors import PermanentError
from worker.parallel.axes import axes_of
from worker.process.link import Link, Wakeup
from worker.process.loop import WorkerLoop
from worker.process.status import HeartbeatThread, WorkerMetrics, WorkerProgress, WorkerStatus


class FakeWorker:
    """A rank, in a thread of this process or as the process itself."""

    def __init__(
        self,
        options: Options,
        replica: int = 0,
        *,
        rank: int = 0,
        model: HashModel | None = None,
        before_step: Callable[[step_pb2.StepPlan], None] = lambda plan: None,
        hello: dict[str, object] | None = None,
        load: Callable[[], None] = lambda: None,
        is_process: bool = False,
    ) -> None:
        """hello: fields of its Hello to change. load: what loading weights does; a ValueError is permanent.

        is_process: it may end this process.
        """
        self.runner = HashRunner(model or HashModel(), options, before_step)
        self.exit_code: int | None = None
        axes = axes_of(options)
        self._global_rank, self._num_ranks = (
            axes.global_rank(rank, replica if options.in_lockstep else 0),
            axes.num_ranks,
        )
        self._load = load
        self._wakeup = Wakeup()
        endpoint = options.step_address(replica)
        curve_dir = Path(options.curve_dir) if options.curve_dir else None
        status, instance = WorkerStatus(), secrets.randbits(63)
        self._watchdog: Watchdog | None = None
        if is_process:
            self.runner.poisons = POISONS
            progress = WorkerProgress(status, step_timeout=options.step_timeout, hang_timeout=options.hang_timeout)
            self._watchdog = Watchdog(progress, page=ProgressPage.inherited())
        self._context = zmq.Context()
        self._link = Link(self._context, endpoint, curve_dir, timeout=options.heartbeat_timeout)
        self._heartbeat = HeartbeatThread(
            self._context,
            heartbeat_endpoint(endpoint),
            curve_dir,
            status,
            rank=rank,
            instance=instance,
            timeout=options.heartbeat_timeout,
            on_loss=self._wakeup.notify,
        )
        self._loop = WorkerLoop(
            hello=_hello(options, rank, instance, hello or {}),
            link=self._link,
            heartbeat=self._heartbeat,
            status=status,
            wakeup=self._wakeup,
            metrics=WorkerMetrics(status.snapshot),
            build=self._build,
            connect=self._meet if axes.num_ranks > 1 else None,
            returns_results=axes.returns_results(rank),
        )
        self._thread = threading.Thread(target=self._run, name=f"fake-worker-{replica}.{rank}", daemon=True)

    def start(self) -> "FakeWorker":
        self._heartbeat.start()
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stops the worker if it still runs, and closes its sockets."""
        self.request_stop()
        self.join()

    def request_stop(self) -> None:
        if self._thread.is_alive():
            self._wakeup.request_stop()

    def join(self) -> int:
        """Waits until the worker ends by itself; returns the exit code that a process would have."""
        self._thread.join(60)
        assert self.exit_code is not None, "the fake worker does not end"
        self._wakeup.close()
        return self.exit_code

    def run(self) -> int:
        """Runs on the calling thread until told to stop; returns the exit code."""
        self._heartbeat.start()
        self._wakeup.stop_on_signals()
        self._run()
        assert self.exit_code is not None
        return self.exit_code

    def _build(self, progress: Callable[[float], None]) -> HashRunner:
        self._load()
        progress(1.0)
        if self._watchdog is not None:
            self._watchdog.start()
        return self.runner

    def _meet(self, address: str, while_waiting: Callable[[], None]) -> Any:
        return meet(address, self._global_rank, self._num_ranks, while_waiting)

    def _run(self) -> None:
        code = self._loop.run()
        self._heartbeat.stop()
        self._link.close(deliver=code != 0)
        self._context.term()
        self.exit_code = code


def _hello(options: Options, rank: int, instance: int, changes: dict[str, object]) -> step_pb2.Hello:
    fields: dict = {
        "protocol_version": PROTOCOL_VERSION,
        "octavo_version": octavo_version(),
        "rank": rank,
        "world_size": options.world_size,
        "model": options.served_model_name,
        "block_size": options.block_size,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "pid": os.getpid(),
        "instance": instance,
        **changes,
    }
    return step_pb2.Hello(**fields)


def main(argv: list[str]) -> int:
    own = ("replica", "rank", "step_seconds", "vocab_size", "eos_every", "max_len", "load_error")
    config, flags, extras = parse_flags(argv, own)
    options = load_options(config, flags)
    replica, rank = own_number(extras, "replica", 0, 1024), own_number(extras, "rank", 0, 1024)
    configure_logging(f"fake-worker-{replica}.{rank}", options.log_level, options.log_format)
    seconds = float(extras.get("step_seconds", "0"))

    def load() -> None:
        if "load_error" in extras:
            raise PermanentError(extras["load_error"])

    model = HashModel(
        vocab_size=own_number(extras, "vocab_size", 1000, 2**31),
        eos_every=own_number(extras, "eos_every", 0, 2**31),
        max_model_len=own_number(extras, "max_len", 512, 2**31),
        encoder_cache_size=options.encoder_cache_size,
    )
    worker = FakeWorker(
        options,
        replica,
        rank=rank,
        model=model,
        load=load,
        before_step=lambda plan: time.sleep(seconds),
        is_process=True,
    )
    return worker.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
