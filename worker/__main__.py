"""`python -m worker [-c FILE] [--replica I] [--rank R] [any option]`: one rank of one replica."""

import gc
import logging
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from configs.flags import own_number, parse_flags, usage
from configs.load import ConfigError, load_options
from configs.options import Options
from protos import step_pb2
from runtime.model_files import ModelNotFoundError, resolve_model
from runtime.process import end_process, raise_open_files, seconds_alive
from runtime.progress.page import ProgressPage
from runtime.progress.watchdog import Watchdog
from runtime.security.curve import CurveError
from runtime.telemetry.http_server import ObservabilityServer
from runtime.telemetry.logs import configure_logging
from runtime.telemetry.metrics import count_dropped_records
from runtime.wire import PROTOCOL_VERSION, heartbeat_endpoint, octavo_version
from worker.errors import PermanentError
from worker.parallel.axes import Axes, axes_of
from worker.process.link import Link, Wakeup
from worker.process.loop import EXIT_PERMANENT, WorkerLoop
from worker.process.status import HeartbeatThread, WorkerMetrics, WorkerProgress, WorkerStatus
from worker.step.runner import StepRunner

if TYPE_CHECKING:
    from worker.parallel.group_init import GroupInit

_log = logging.getLogger("octavo.worker")

_OWN_FLAGS = {"replica": "The worker's replica, from 0. Default 0.", "rank": "Its rank, from 0. Default 0."}
_READY_STATES = (step_pb2.WORKER_STATE_IDLE, step_pb2.WORKER_STATE_STEPPING)


def main(argv: list[str]) -> int:
    """Runs a worker until it is told to stop. Returns the exit code: 0, or non-zero with the cause on stderr."""
    if {"-h", "--help"} & set(argv):
        print(usage(f"python -m {__package__}", _OWN_FLAGS))
        return 0
    try:
        config, flags, own = parse_flags(argv, tuple(_OWN_FLAGS))
        options = load_options(config, flags)
        replica = own_number(own, "replica", 0, options.data_parallel_size)
        rank = own_number(own, "rank", 0, options.world_size)
    except ConfigError as error:
        print(f"worker: {error}", file=sys.stderr)
        return EXIT_PERMANENT
    configure_logging(f"worker-{replica}.{rank}", options.log_level, options.log_format)
    raise_open_files()
    status = WorkerStatus()
    metrics = WorkerMetrics(status.snapshot)
    progress = WorkerProgress(status, step_timeout=options.step_timeout, hang_timeout=options.hang_timeout)
    watchdog = Watchdog(progress, page=ProgressPage.inherited())
    try:
        server = _observe(options, replica, rank, metrics, watchdog.health(lambda: _health(status)))
    except OSError as error:
        port = options.process_metrics_port("worker", replica, rank)
        _log.error(
            "metrics_port=%d: cannot listen on %s:%d for this worker (%s); use another port, or 0 for none",
            options.metrics_port,
            options.metrics_host,
            port,
            error.strerror,
        )
        return EXIT_PERMANENT
    try:
        return _serve(options, replica, rank, status, metrics, watchdog)
    except CurveError as error:
        _log.error("%s", error)
        return EXIT_PERMANENT
    finally:
        watchdog.stop()
        if server is not None:
            server.stop()


def _serve(
    options: Options, replica: int, rank: int, status: WorkerStatus, metrics: WorkerMetrics, watchdog: Watchdog
) -> int:
    endpoint = options.step_address(replica)
    curve_dir = Path(options.curve_dir) if options.curve_dir else None
    instance = secrets.randbits(63)
    wakeup = Wakeup()
    wakeup.stop_on_signals()
    status.set(step_pb2.WORKER_STATE_LOADING)
    with zmq.Context() as context:
        link = Link(context, endpoint, curve_dir, timeout=options.heartbeat_timeout)
        heartbeat = HeartbeatThread(
            context,
            heartbeat_endpoint(endpoint),
            curve_dir,
            status,
            rank=rank,
            instance=instance,
            timeout=options.heartbeat_timeout,
            on_loss=wakeup.notify,
        )
        heartbeat.start()
        code = EXIT_PERMANENT
        try:
            axes = axes_of(options)
            build = _builder(options, replica, rank, metrics, watchdog)
            group_init = _group_init(options, axes, replica, rank, wakeup) if axes.num_ranks > 1 else None
            hello = _hello(options, rank, instance)
            if group_init is not None:
                hello.store_address = group_init.store_address
            loop = WorkerLoop(
                hello=hello,
                link=link,
                heartbeat=heartbeat,
                status=status,
                wakeup=wakeup,
                metrics=metrics,
                build=build,
                connect=group_init,
                returns_results=axes.returns_results(rank),
                max_steps_in_flight=options.max_steps_in_flight,
            )
            code = loop.run()
        except (ModelNotFoundError, PermanentError) as error:
            _log.error("%s", error)
            failure = step_pb2.Failure(rank=rank, message=str(error), permanent=True)
            link.send(step_pb2.WorkerToScheduler(failure=failure))
        finally:
            heartbeat.stop()
            link.close(deliver=code != 0)
    return code


def _hello(options: Options, rank: int, instance: int) -> step_pb2.Hello:
    return step_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        octavo_version=octavo_version(),
        rank=rank,
        world_size=options.world_size,
        model=options.served_model_name or resolve_model(options.model).name,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_logprobs=options.max_logprobs,
        pid=os.getpid(),
        instance=instance,
    )


def _builder(
    options: Options, replica: int, rank: int, metrics: WorkerMetrics, watchdog: Watchdog
) -> Callable[[Callable[[float], None]], StepRunner]:
    """Imports torch while the scheduler may still be starting. The returned function builds the runner, and sets the
    number of threads before anything computes."""
    # The import leaves 170,000 objects, none of them garbage. Scanning them costs a tenth of the import's time, and
    # later 60 ms in any step that triggers a collection.
    gc.disable()
    import torch  # takes a second: the heartbeat thread is already running

    from worker.cpu.threads import prepare_threads
    from worker.layers.forward_context import ExpertLoad
    from worker.process.build import build_runner
    from worker.process.expert_metrics import ExpertMetrics

    gc.freeze()
    gc.enable()

    _log.debug("torch is imported, %.2f s after the process began", seconds_alive())
    torch.set_num_interop_threads(1)

    def watch_experts(load: ExpertLoad) -> None:
        metrics.registry.register(ExpertMetrics(load))

    def build(progress: Callable[[float], None]) -> StepRunner:
        cores = prepare_threads(options, replica, rank)
        runner = build_runner(options, progress, cores=cores, replica=replica, rank=rank, watch_experts=watch_experts)
        # Loading may hold the interpreter's lock for long.
        watchdog.start()
        return runner

    return build


def _group_init(options: Options, axes: Axes, replica: int, rank: int, wakeup: Wakeup) -> "GroupInit":
    from worker.parallel.group_init import GroupInit  # imports torch

    def stop_if_told_to() -> None:
        if wakeup.stop_requested:
            raise SystemExit(0)

    return GroupInit(options, axes, replica, rank, stop_if_told_to)


def _observe(
    options: Options, replica: int, rank: int, metrics: WorkerMetrics, health: Callable[[], tuple[bool, str]]
) -> ObservabilityServer | None:
    port = options.process_metrics_port("worker", replica, rank)
    if not port:
        return None
    count_dropped_records(metrics.registry)
    server = ObservabilityServer(options.metrics_host, port, metrics.registry, health)
    server.start()
    return server


def _health(status: WorkerStatus) -> tuple[bool, str]:
    now = status.snapshot()
    name = step_pb2.WorkerState.Name(now.state).removeprefix("WORKER_STATE_").lower()
    return now.state in _READY_STATES, f"{name}, epoch {now.epoch}, step {now.step}"


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
