"""Modules that a process must not import to start: all processes would pay for them, on few cores, before any token.

The router's tokenizer and the scheduler have such tests among their own.
"""

import subprocess
import sys

import pytest

from tests.support.repository import ROOT

HEAVY = {"torch", "transformers", "scipy", "matplotlib", "pandas", "gguf", "opentelemetry"}


@pytest.mark.parametrize(
    ("module", "others"),
    [
        # `octavo --help` and the start of every command.
        ("octavo.cli.main", {"grpc", "google", "numpy", "zmq", "asyncio", "prometheus_client"}),
        # Before the processes have started; gRPC and the client are imported after that.
        ("octavo.cluster.launcher", {"grpc", "google", "numpy", "zmq", "tenacity"}),
        ("router.__main__", {"numpy", "zmq", "rich", "huggingface_hub"}),
        ("scheduler.__main__", {"rich", "jinja2", "tokenizers"}),
        # torch is imported once heartbeats flow.
        ("worker.__main__", {"grpc", "numpy", "rich", "jinja2", "tokenizers"}),
    ],
)
def test_a_process_starts_without(module: str, others: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY | others} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stdout.split()


def test_a_worker_on_a_cpu_does_without_triton() -> None:
    """Triton takes half a second to import, and does not exist on every platform."""
    code = "import sys, worker.process.build; print(*sorted({'triton', 'worker.gpu.build'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stdout.split()
