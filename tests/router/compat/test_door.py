"""A router imports other projects' services, and their messages, only for the names in option `compat`."""

import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT

# Starts routers one after the other, each with the next value of `compat`, and prints what has been imported by then.
PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.fakes.routers import running_router, socket_address

async def start(compat):
    async with running_router([socket_address(Path(sys.argv[1]), "nobody")], compat=compat):
        found = (name for name in sys.modules if name.startswith(("router.compat", "smg_grpc_proto")))
        print(*sorted(found), sep=",")

for compat in ("", "kserve", "vllm,smg,sglang,kserve"):
    asyncio.run(start(compat))
"""


def test_a_router_imports_the_services_that_it_is_asked_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    without, kserve, every = (set(line.split(",")) for line in done.stdout.splitlines())
    assert without == {""}
    assert {"router.compat.kserve", "router.compat.protos.kserve_pb2", "router.compat.protos.kserve_pb2_grpc"} <= kserve
    others = ("vllm", "sglang", "smg", "kv_", "protos.vllm", "protos.sglang")
    assert not {name for name in kserve if name.removeprefix("router.compat.").startswith(others)}
    protos = {f"router.compat.protos.{name}_pb2_grpc" for name in ("vllm", "sglang", "kserve")}
    assert {"router.compat.vllm", "router.compat.smg", "router.compat.sglang", *protos} <= every
