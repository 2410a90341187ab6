"""Ranks on GPUs as threads of one process, in Triton's interpreter."""

import threading
from typing import Any

import pytest
from triton.runtime.interpreter import InterpretedFunction


def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is one for all threads, and knows the program that runs. No kernel waits for another rank."""
    lock, run = threading.RLock(), InterpretedFunction.run

    def run_alone(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return run(*args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run_alone)
