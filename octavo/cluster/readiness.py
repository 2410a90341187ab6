"""Asks the processes of a cluster for their state."""

import asyncio
import http.client

from configs.options import Options


async def read_health(host: str, port: int) -> tuple[bool, str] | None:
    """Reads a process's /health: (is it well, its line of text). None if it does not listen yet."""
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
    """The address at which this machine reaches a server that is bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(host, host).strip("[]")


def grpc_target(host: str, port: int) -> str:
    host = connectable(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def router_targets(options: Options) -> tuple[str, ...]:
    """The targets at which clients on this machine reach each router."""
    return tuple(grpc_target(options.host, options.router_port(router)) for router in range(options.num_routers))


def http_url(options: Options) -> str:
    """The address at which clients on this machine reach the first router's HTTP API, without TLS."""
    return f"http://{grpc_target(options.host, options.http_port)}"
