"""Settings of all tests: Hypothesis examples have no deadline, because the machine may be busy; without a GPU, Triton
interprets its kernels, unless --gpu forbids it; gRPC's core logs nothing among the results; started processes heed
Ctrl-C."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("patient", parent=settings(), deadline=None)
settings.load_profile("patient")

# Must be set before Triton is imported: its own functions are built for one mode at import. Asking torch for a GPU
# would make each small test run pay for importing torch.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Same as runtime/grpc_setup/quiet.py; must be set before grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# A shell that runs tests in the background has them ignore Ctrl-C; processes that they interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="fail if kernels would be interpreted, not run on a GPU")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu") and (why := _why_interpreted()):
        raise pytest.UsageError(f"--gpu: {why}")


def pytest_report_header() -> str:
    return "Triton kernels: " + ("interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else "on a GPU")


def _why_interpreted() -> str:
    """Returns why tests of kernels would not run on a GPU; empty if they do."""
    if not Path("/dev/nvidiactl").exists():
        return "there is no GPU (no /dev/nvidiactl), so kernels would be interpreted"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set, so kernels would be interpreted"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    return ""
