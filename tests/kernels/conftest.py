"""Compiling for GPUs and testing deliberate faults take long, so both run in parallel with the tests that interpret
kernels."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernels.ahead_of_time import Compilations, Compiled
from tests.support.kernels.faults import Fault, FaultRun, FaultRuns

_HERE = Path(__file__).parent
_AHEAD_OF_TIME, _FAULTS = _HERE / "test_ahead_of_time.py", _HERE / "test_gpu_faults.py"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves tests that need compiled kernels or faults behind this directory's other tests."""
    places = [index for index, item in enumerate(items) if _HERE in item.path.parents]
    in_order = sorted((items[index] for index in places), key=lambda item: item.path in (_FAULTS, _AHEAD_OF_TIME))
    for index, item in zip(places, in_order, strict=True):
        items[index] = item


def _selected(session: pytest.Session, path: Path, parameter: str) -> list[Any]:
    parameters = [getattr(item, "callspec", None) for item in session.items if item.path == path]
    return [
        callspec.params[parameter] for callspec in parameters if callspec is not None and parameter in callspec.params
    ]


@pytest.fixture(scope="session")
def compilations(request: pytest.FixtureRequest) -> Iterator[dict[str, "Future[Compiled]"]]:
    """Compilations for the selected tests, by str(target)."""
    compilations = Compilations([*dict.fromkeys(_selected(request.session, _AHEAD_OF_TIME, "target"))])
    yield compilations.results
    compilations.stop()


@pytest.fixture(scope="session")
def fault_runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Fault, "Future[FaultRun]"]]:
    """Runs of the selected faults."""
    runs = FaultRuns(_selected(request.session, _FAULTS, "fault"), lambda: tmp_path_factory.mktemp("fault"))
    yield runs.results
    runs.close()


@pytest.fixture(scope="session", autouse=True)
def _begin_beside(compilations: dict[str, "Future[Compiled]"], fault_runs: dict[Fault, "Future[FaultRun]"]) -> None:
    """Starts both kinds of background work with the first test of this directory."""
