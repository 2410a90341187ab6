"""Settings of all tests: Hypothesis examples have no deadline, because the machine may be busy; without a GPU, Triton
interprets its kernels, unless --gpu forbids it; gRPC's core logs nothing among the results; started processes heed
Ctrl-C. A test that leaves this process in another state than it found it in fails."""

import contextvars
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
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


# By the names in their declarations: what a call, a forward pass or a recording is part of.
_OWN_CONTEXT = ("caller", "connection", "traceparent", "trace_id", "release", "forward pass", "recorded_arch")


@pytest.fixture(autouse=True)
def _unchanged_process() -> Iterator[None]:
    """Later tests must not depend on what this one leaves behind. torch's threads are restored: a worker that is built
    in this process leaves torch one of them."""
    before, threads = _state(), _torch_threads()
    yield
    after = _state()
    if threads and threads != _torch_threads():
        sys.modules["torch"].set_num_threads(threads)
    changed = [f"{name}: {was!r}, now {after.get(name)!r}" for name, was in before.items() if after.get(name) != was]
    assert not changed, f"this test leaves changes behind: {'; '.join(changed)}"


def _state() -> dict[str, object]:
    found: dict[str, object] = {f"${name}": value for name, value in os.environ.items()}
    found.pop("$PYTEST_CURRENT_TEST", None)
    context = {each.name: value for each, value in contextvars.copy_context().items()}
    found |= {f"context variable {name!r}": context.get(name) for name in _OWN_CONTEXT}
    found |= {f"level of the logger {name!r}": logging.getLogger(name).level for name in ("", "octavo")}
    return {**found, "directory": Path.cwd()}


def _torch_threads() -> int:
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="fail if kernels would be interpreted, not run on a GPU")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu") and (why := _why_interpreted()):
        raise pytest.UsageError(f"--gpu: {why}")


def pytest_unconfigure() -> None:
    # Schedulers in this process freeze what exists. Never collected, Triton's objects would be reported as leaked, in
    # pages behind the summary.
    gc.unfreeze()


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
