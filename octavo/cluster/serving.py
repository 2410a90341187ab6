"""Waits until routers serve, by gRPC's health service or by /health."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from configs.options import Options
from octavo.cluster.errors import ClusterError
from octavo.cluster.readiness import read_health

SERVICE = "octavo.v1.Inference"
# A router starts to listen one or two seconds after the first query.
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
)
_HEALTH_INTERVAL_S = 0.25


async def wait_until_healthy(options: Options) -> None:
    """Waits for routers with TLS by /health: this process may lack what it takes to call them. Raises ClusterError."""
    if not options.metrics_port:
        raise ClusterError("metrics_port=0 with tls_cert_file: `octavo up` needs /health to see when the router serves")
    ports = range(options.metrics_port, options.metrics_port + options.num_router_processes)
    await asyncio.gather(*(_wait_for_health(options.metrics_host, port) for port in ports))


async def _wait_for_health(host: str, port: int) -> None:
    while True:
        health = await read_health(host, port)
        if health is not None and health[0]:
            return
        await asyncio.sleep(_HEALTH_INTERVAL_S)


async def wait_until_serving(*targets: str) -> None:
    """Returns once each router reports that it serves. Routers may start later, or restart."""
    await asyncio.gather(*map(_wait_for_router, targets))


async def _wait_for_router(target: str) -> None:
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
        # The generated stub's types are those of synchronous channels.
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for response in stub.Watch(request, wait_for_ready=True):
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                # The router went away; the channel waits for its successor.
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    raise
