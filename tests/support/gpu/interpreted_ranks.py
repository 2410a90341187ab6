"""Ranks on GPUs as threads of one process, in Triton's interpreter."""

import threading
from typing import Any

import pytest
from triton.runtime.interpreter import InterpretedFunction


def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs one kernel at a time: threads share the interpreter and its current program. No kernel waits for a rank."""
    lock, run = threading.RLock(), InterpretedFunction.run

    def run_alone(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return run(*args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run_alone)
