"""Kernels with deliberate faults fail their tests."""

from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.support.kernels.faults import Fault, FaultRun, all_faults


@pytest.mark.parametrize("fault", all_faults(), ids=lambda fault: f"{Path(fault.path).parent.name}: {fault.name}")
def test_fault_is_found(fault: Fault, fault_runs: "dict[Fault, Future[FaultRun]]") -> None:
    run = fault_runs[fault].result()
    # 1: tests ran and some failed. A missing test, or a module that no longer imports, gives another code.
    assert run.exit_code == 1, run.output[-3000:]
    # The results were wrong; the kernel did not stop at an error.
    assert "AssertionError" in run.output, run.output[-3000:]
