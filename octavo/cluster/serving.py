"""Waits until a router serves, as gRPC's health service tells it."""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE = "octavo.v1.Inference"
# A router starts to listen a second or two after it is asked for the first time.
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
)


async def wait_until_serving(target: str) -> None:
    """Returns once the router at `target` says that requests are served; it may start later, and start again."""
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
        # The generated stub's types are those of the synchronous one.
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for response in stub.Watch(request, wait_for_ready=True):
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                # It went away; the channel waits for the next one.
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    raise
