"""Kernels with deliberate faults fail their tests."""

from pathlib import Path

import pytest

from tests.support.faults import Fault, all_faults, run_with_fault


@pytest.mark.parametrize("fault", all_faults(), ids=lambda fault: f"{Path(fault.path).parent.name}: {fault.name}")
def test_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    result = run_with_fault(fault, tmp_path)
    # 1: tests ran, and some failed; a test that does not exist, or a module that no longer imports, is another code.
    assert result.returncode == 1, result.stdout[-3000:] + result.stderr[-3000:]
    # Wrong results, not a kernel that stopped at an error.
    assert "AssertionError" in result.stdout, result.stdout[-3000:]
