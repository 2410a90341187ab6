"""Kernels with deliberate faults fail their tests."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.faults import Fault, FaultRun, FaultServer, all_faults

Runs = dict[Fault, "Future[FaultRun]"]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Of the faults that were selected, two at a time."""
    parameters = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    faults: list[Fault] = [callspec.params["fault"] for callspec in parameters if callspec is not None]
    own, servers = threading.local(), list[FaultServer]()

    def start_server() -> None:
        own.server = FaultServer()
        servers.append(own.server)

    def run(fault: Fault, directory: Path) -> FaultRun:
        return own.server.run(fault, directory)

    with ThreadPoolExecutor(2, initializer=start_server) as executor:
        yield {fault: executor.submit(run, fault, tmp_path_factory.mktemp("fault")) for fault in faults}
        executor.shutdown(cancel_futures=True)
    for server in servers:
        server.close()


@pytest.mark.parametrize("fault", all_faults(), ids=lambda fault: f"{Path(fault.path).parent.name}: {fault.name}")
def test_fault_is_found(fault: Fault, runs: Runs) -> None:
    run = runs[fault].result()
    # 1: tests ran, and some failed; a test that does not exist, or a module that no longer imports, is another code.
    assert run.exit_code == 1, run.output[-3000:]
    # Wrong results, not a kernel that stopped at an error.
    assert "AssertionError" in run.output, run.output[-3000:]
