"""Runs one router, or one of its processes: `python -m router [--router I] [--process J] [-c FILE] [any option]`."""

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from functools import partial
from pathlib import Path

import runtime.grpc_setup.quiet  # noqa: F401 (before grpc)
from configs.flags import own_number, parse_flags, usage
from configs.load import ConfigError, load_options
from configs.options import Options
from router.api.console.images import chat_images
from router.api.console.pages import Console
from router.api.gateway.app import Gateway
from router.api.gateway.batches.store import BatchStore
from router.api.gateway.responses.store import StoreError, new_store
from router.api.gateway.server import GatewayServer
from router.errors import AddressError, MissingPackageError
from router.security.keys import Keys, KeysError
from router.server import ProcessIndex, RouterServer
from router.text.tokenizer import Tokenizer
from runtime.free_memory import giving_memory_back
from runtime.model_files import ModelNotFoundError, resolve_model
from runtime.process import end_process, most_connections, raise_open_files
from runtime.progress.watchdog import Watchdog, watch_event_loop
from runtime.security.tls import TlsError
from runtime.telemetry.http_server import ObservabilityServer
from runtime.telemetry.lag import watch_lag
from runtime.telemetry.logs import configure_logging
from runtime.telemetry.metrics import count_dropped_records, count_tasks
from runtime.telemetry.tracing import TracingError
from runtime.tokenizer.files import TokenizerError, tokenizer_directory

log = logging.getLogger("octavo.router")

# A restart would fail in the same way.
EXIT_PERMANENT = 2
_OWN_FLAGS = {
    "router": "Index of this router among num_routers, from 0 (the default).",
    "process": "Index of this process among the router's api_server_count processes, from 0; they share the router's "
    "ports. Not given: the only process, with ports of its own.",
}


def main(argv: list[str]) -> int:
    """Runs a router until SIGTERM or SIGINT. Returns the exit code: 0, or 2 with the cause on stderr."""
    if {"-h", "--help"} & set(argv):
        print(usage(f"python -m {__package__}", _OWN_FLAGS))
        return 0
    try:
        config, flags, own = parse_flags(argv, tuple(_OWN_FLAGS))
        options = load_options(config, flags)
        index = ProcessIndex(
            router=own_number(own, "router", 0, options.num_routers),
            process=own_number(own, "process", 0, options.api_server_count),
            shares_ports="process" in own,
        )
    except ConfigError as error:
        print(f"router: {error}", file=sys.stderr)
        return EXIT_PERMANENT
    name = "router" if options.num_router_processes == 1 else f"router-{index}"
    configure_logging(name, options.log_level, options.log_format)
    raise_open_files()
    try:
        asyncio.run(_serve(options, index))
    except (
        ModelNotFoundError,
        TokenizerError,
        AddressError,
        MissingPackageError,
        KeysError,
        TlsError,
        TracingError,
        StoreError,
    ) as error:
        log.error("%s", error)
        return EXIT_PERMANENT
    return 0


async def _serve(options: Options, index: ProcessIndex) -> None:
    model = resolve_model(options.model)
    tokenizer = Tokenizer(tokenizer_directory(model, options.tokenizer))
    server = RouterServer(options, tokenizer, options.served_model_name or model.name, index)
    signals = _count_signals()
    if server.keys is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reread, server.keys)
    await server.start()
    http = gateway = None
    watching = contextlib.ExitStack()
    try:
        watchdog = watching.enter_context(watch_event_loop(options.hang_timeout))
        watching.enter_context(watch_lag(server.metrics.lag))
        watching.enter_context(giving_memory_back())
        http = _observe(options, index, server, watchdog)
        gateway = _serve_http(options, index, server, watchdog)
        # The objects that exist now stay: scanning them again would hold the event loop for 0.1 to 0.2 s now and then.
        gc.collect()
        gc.freeze()
        # The next collection of all comes when a quarter as many objects are new as the last one has found.
        gc.collect()
        log.info("listening on %s port %d", options.host, server.port)
        await signals.get()
        drain = asyncio.create_task(server.drain(None if gateway is None else gateway.leave))
        again = asyncio.create_task(signals.get())
        await asyncio.wait({drain, again}, return_when=asyncio.FIRST_COMPLETED)
        drain.cancel()
        again.cancel()
    finally:
        await server.stop()
        if gateway is not None:
            await gateway.stop()
        if http is not None:
            http.stop()
        watching.close()


def _reread(keys: Keys) -> None:
    try:
        keys.reread()
    except KeysError as error:
        log.error("%s; the old keys stay in force", error)
    else:
        log.info("reloaded %d API keys", len(keys))


def _count_signals() -> asyncio.Queue[int]:
    """Returns a queue of the signals received: the first one starts a drain, the second one ends it."""
    received: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received.put_nowait, number)
    return received


def _serve_http(
    options: Options, index: ProcessIndex, server: RouterServer, watchdog: Watchdog
) -> GatewayServer | None:
    """Starts the HTTP gateway; None without http_port. Raises AddressError, StoreError."""
    if not options.http_port:
        if options.console:
            log.warning("console=true has no effect with http_port=0: give it a port")
        return None
    gateway = Gateway(
        server.intake,
        server.registry,
        server.readiness,
        max_body_bytes=options.max_message_bytes,
        max_bodies_bytes=options.max_bodies_bytes,
        strict_fields=options.strict_fields,
        allowed_origins=options.allowed_origins,
        allowed_hosts=options.allowed_hosts,
        keys=server.keys,
        responses=new_store(options.responses_dir, options.max_responses_bytes),
        batches=BatchStore(Path(options.batches_dir), options.max_files_bytes) if options.batches_dir else None,
        batch_concurrency=options.batch_concurrency,
        is_tracing=server.is_tracing,
        attachments=server.attachments,
        console=_console(options, server) if options.console else None,
    )
    port = options.router_http_port(index.router)
    http = GatewayServer(
        gateway,
        options.host,
        port,
        server.tls,
        shares_port=index.shares_ports,
        max_connections=most_connections(options.max_connections),
        is_overloaded=watchdog.is_overloaded,
    )
    http.start()
    log.info("listening for HTTP on %s port %d", options.host, http.port)
    if options.console:
        log.info("the console is at /console of that port")
    return http


def _console(options: Options, server: RouterServer) -> Console:
    images = partial(chat_images, server.intake, options.max_message_bytes)
    return Console(server.observer, server.operator, images)


def _observe(
    options: Options, index: ProcessIndex, server: RouterServer, watchdog: Watchdog
) -> ObservabilityServer | None:
    """Serves /metrics and /health; None without a metrics port. Raises AddressError."""
    port = options.process_metrics_port("router", index.router, index.process)
    if not port:
        return None
    count_tasks(server.metrics.registry)
    count_dropped_records(server.metrics.registry)
    try:
        health = watchdog.health(server.readiness)
        http = ObservabilityServer(options.metrics_host, port, server.registry, health)
    except OSError as error:
        raise AddressError(
            f"can't listen on metrics_host={options.metrics_host!r}, metrics_port={port}: {error.strerror}; "
            f"choose another port, or 0 for none"
        ) from None
    http.start()
    return http


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
