"""Kernels with deliberate faults fail their tests."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.faults import Fault, all_faults, run_with_fault

Runs = dict[Fault, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Of the faults that were selected, two at a time: most of a run is the start of a process."""
    parameters = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    faults: list[Fault] = [callspec.params["fault"] for callspec in parameters if callspec is not None]
    with ThreadPoolExecutor(2) as executor:
        yield {fault: executor.submit(run_with_fault, fault, tmp_path_factory.mktemp("fault")) for fault in faults}
        executor.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault", all_faults(), ids=lambda fault: f"{Path(fault.path).parent.name}: {fault.name}")
def test_fault_is_found(fault: Fault, runs: Runs) -> None:
    result = runs[fault].result()
    # 1: tests ran, and some failed; a test that does not exist, or a module that no longer imports, is another code.
    assert result.returncode == 1, result.stdout[-3000:] + result.stderr[-3000:]
    # Wrong results, not a kernel that stopped at an error.
    assert "AssertionError" in result.stdout, result.stdout[-3000:]
