"""What each process imports to start: every process of a cluster pays for it, on few cores, before the first token.

The router's tokenizer and the scheduler have such tests beside their others.
"""

import subprocess
import sys

import pytest

from tests.support.repository import ROOT

HEAVY = {"torch", "transformers", "scipy", "matplotlib", "pandas", "gguf", "opentelemetry"}


@pytest.mark.parametrize(
    ("module", "others"),
    [
        # `octavo --help`, and what every command begins with.
        ("octavo.cli.main", {"grpc", "google", "numpy", "zmq", "asyncio", "prometheus_client"}),
        # Until the processes have begun; gRPC and the client come after that.
        ("octavo.cluster.launcher", {"grpc", "google", "numpy", "zmq", "tenacity"}),
        ("router.__main__", {"numpy", "zmq", "rich", "huggingface_hub"}),
        ("scheduler.__main__", {"rich", "jinja2", "tokenizers"}),
        # torch comes once heartbeats flow.
        ("worker.__main__", {"grpc", "numpy", "rich", "jinja2", "tokenizers"}),
    ],
)
def test_a_process_starts_without(module: str, others: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY | others} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stdout.split()


def test_a_worker_on_a_cpu_does_without_triton() -> None:
    """It takes half a second to import, and is not there on every platform."""
    code = "import sys, worker.process.build; print(*sorted({'triton', 'worker.gpu.build'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stdout.split()
