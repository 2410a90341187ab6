"""Shared parts of the gRPC servers of routers and schedulers."""

import ipaddress
import logging
import socket

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2


def _is_no_clients_fault(record: logging.LogRecord) -> bool:
    """Filters out tracebacks of undecodable messages, by which clients could fill the log. Such a call ends with
    UNKNOWN, which tells the client the reason."""
    return record.exc_info is None or not isinstance(record.exc_info[1], DecodeError)


# By default gRPC ends a connection after three pings within five minutes, also one of a client that is alive and waits.
# In a flood it is worse: such a connection ends when its writes are done, which pings go on with, and each of them adds
# an error to those before (140 us a ping after 300,000). Pings that are only answered take 0.6 us each.
ANSWERS_PINGS = ("grpc.http2.max_ping_strikes", 0)

# The logger of grpc.aio's servers.
logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_clients_fault)


def add_reflection(server: grpc.aio.Server, *services: str) -> None:
    """Adds reflection v1 and v1alpha, by which clients list the server's services.

    services: full names of the server's own services.
    """
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    # grpcio brings v1alpha only; v1 has the same messages under another name, and newer tools ask for it first.
    servicer = reflection.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    name = "grpc.reflection.v1.ServerReflection"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}),))


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a host name or address; IPv6 with or without brackets."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def why_not_bound(host: str, port: int) -> str:
    """The cause of a failed bind, found by binding again, because gRPC does not report it."""
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return "refused"
    except OSError as error:
        # Drops the address, which create_server adds and the caller names as well.
        return (error.strerror or str(error)).partition(" (while")[0]
