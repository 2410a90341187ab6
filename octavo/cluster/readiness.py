"""Asks the processes of a cluster how far they are."""

import asyncio
import http.client
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE = "octavo.v1.Inference"
_POLL_INTERVAL = 0.25


async def wait_until_serving(target: str) -> None:
    """Returns once the router at `target` says that requests are served."""
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    options = (("grpc.max_reconnect_backoff_ms", 500), ("grpc.initial_reconnect_backoff_ms", 100))
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        # The generated stub's types are those of the synchronous one.
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                response = await stub.Check(request, timeout=2.0)
            except grpc.aio.AioRpcError as error:
                # Not listening yet, or listening without the service registered.
                if error.code() not in (
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.StatusCode.NOT_FOUND,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                ):
                    raise
            else:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(_POLL_INTERVAL)


async def read_health(host: str, port: int) -> tuple[bool, str] | None:
    """What a process's /health says: whether it is well, and its line of text. None if it does not listen yet."""
    return await asyncio.to_thread(_read_health, host, port)


def _read_health(host: str, port: int) -> tuple[bool, str] | None:
    connection = http.client.HTTPConnection(connectable(host), port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        return response.status == http.HTTPStatus.OK, response.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def connectable(host: str) -> str:
    """The address by which a server bound to `host` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(host, host).strip("[]")


def grpc_target(host: str, port: int) -> str:
    host = connectable(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
