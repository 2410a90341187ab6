"""`python -m scheduler [-c FILE] [--replica I] [any option]`: the scheduler of one replica."""

import asyncio
import contextlib
import logging
import signal
import sys

import runtime.grpc_setup.quiet  # noqa: F401 (before grpc)
from configs.flags import own_number, parse_flags, usage
from configs.load import ConfigError, load_options
from configs.options import Options
from runtime.process import end_process, raise_open_files
from runtime.progress.watchdog import Watchdog, watch_event_loop
from runtime.security.curve import CurveError
from runtime.security.tls import TlsError
from runtime.telemetry.http_server import ObservabilityServer
from runtime.telemetry.lag import watch_lag
from runtime.telemetry.logs import configure_logging
from runtime.telemetry.metrics import count_dropped_records, count_tasks
from runtime.telemetry.tracing import TracingError
from scheduler.recording.records import RecordingError
from scheduler.server import SchedulerServer
from scheduler.sockets import AddressError

log = logging.getLogger("octavo.scheduler")

EXIT_FAILED = 1
# A restart would fail in the same way.
EXIT_PERMANENT = 2
_OWN_FLAGS = {"replica": "Which replica's scheduler this is, from 0. Default 0."}
# The longest that the step loop waits for the interpreter lock when a result arrives; Python's default is 5 ms.
_SWITCH_INTERVAL_S = 0.0005


def main(argv: list[str]) -> int:
    """Runs a scheduler until SIGTERM or SIGINT, which drain it; a second one ends it at once.

    Returns the exit code: 0; 1 if it failed while running; 2 if it could not start, or a restart would fail in the same
    way. The cause is on stderr.
    """
    if {"-h", "--help"} & set(argv):
        print(usage(f"python -m {__package__}", _OWN_FLAGS))
        return 0
    try:
        config, flags, own = parse_flags(argv, tuple(_OWN_FLAGS))
        options = load_options(config, flags)
        replica = own_number(own, "replica", 0, options.data_parallel_size)
    except ConfigError as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return EXIT_PERMANENT
    configure_logging(f"scheduler-{replica}", options.log_level, options.log_format)
    raise_open_files()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        return asyncio.run(_serve(options, replica))
    except (AddressError, CurveError, TlsError, RecordingError, TracingError) as error:
        log.error("%s", error)
        return EXIT_PERMANENT


async def _serve(options: Options, replica: int) -> int:
    """Runs a scheduler until it ends. Returns the exit code."""
    server = SchedulerServer(options, replica)
    signals = _watch_signals()
    await server.start()
    http = None
    ended = asyncio.ensure_future(server.wait())
    watching = contextlib.ExitStack()
    try:
        watchdog = watching.enter_context(watch_event_loop(options.hang_timeout, server.step_loop.progress))
        watching.enter_context(watch_lag(server.step_loop.metrics.lag, server.step_loop.watched))
        http = _observe(options, replica, server, watchdog)
        log.info("listening for routers on %s, for workers on %s", server.address, options.step_address(replica))
        if await _ended_before(ended, signals):
            return _exit_code(server, ended.result())
        server.drain()
        if await _ended_before(ended, signals):
            return _exit_code(server, ended.result())
        log.warning("second signal: running requests end now")
    finally:
        await server.stop()
        if http is not None:
            http.stop()
        watching.close()
    return _exit_code(server, await ended)


def _exit_code(server: SchedulerServer, cause: str | None) -> int:
    """The exit code for a cause of failure; None means that the scheduler was told to end."""
    if cause is None:
        return 0
    log.error("%s", cause)
    return EXIT_PERMANENT if server.step_loop.failed_for_good else EXIT_FAILED


def _watch_signals() -> asyncio.Queue[int]:
    received: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received.put_nowait, number)
    return received


async def _ended_before(ended: asyncio.Future[str | None], signals: asyncio.Queue[int]) -> bool:
    """Waits for the scheduler's end or the next signal. True if it has ended."""
    signalled = asyncio.ensure_future(signals.get())
    await asyncio.wait((ended, signalled), return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    return ended.done()


def _observe(options: Options, replica: int, server: SchedulerServer, watchdog: Watchdog) -> ObservabilityServer | None:
    """Starts serving /metrics and /health; None if no port is set. Raises AddressError."""
    port = options.process_metrics_port("scheduler", replica)
    if not port:
        return None
    step_loop = server.step_loop
    count_tasks(step_loop.metrics.registry)
    count_dropped_records(step_loop.metrics.registry)
    try:
        health = watchdog.health(lambda: step_loop.status.health)
        http = ObservabilityServer(options.metrics_host, port, step_loop.metrics.shown, health)
    except OSError as error:
        raise AddressError(
            f"metrics_port={options.metrics_port}: cannot listen on {options.metrics_host}:{port} ({error.strerror}); "
            f"give another port, or 0 for none"
        ) from None
    http.start()
    return http


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
