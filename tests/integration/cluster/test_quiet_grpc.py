"""Text that a peer sends to gRPC's core does not get into our logs: the core would print it as it is."""

import os
import subprocess
import sys

import pytest

_SERVE = """
import asyncio, struct
import {module}
import grpc.aio

def frame(kind, payload):
    return struct.pack(">I", len(payload))[1:] + bytes((kind, 0)) + bytes(4) + payload

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    settings, goaway = frame(4, b""), frame(7, struct.pack(">II", 0, 99) + b"\\nanother line")
    writer.write(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + settings + goaway + frame(6, b"a ping.."))
    await reader.readuntil(b"a ping..")
    await server.stop(None)

asyncio.run(main())
"""


@pytest.mark.parametrize("module", ["router.__main__", "scheduler.__main__", "octavo.cli.main"])
def test_a_peers_goaway_is_not_printed(module: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    program = [sys.executable, "-c", _SERVE.format(module=module)]
    done = subprocess.run(program, check=True, capture_output=True, text=True, timeout=60, env=environment)
    assert not done.stderr
