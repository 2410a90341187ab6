"""Compiling for GPUs takes longest and nobody has to wait for it: it runs beside the tests that interpret kernels."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.support.ahead_of_time import Compilations, Compiled

_HERE = Path(__file__).parent
_AHEAD_OF_TIME = _HERE / "test_ahead_of_time.py"
# The faults take all cores, too: by then the compilers are nearly done.
_LAST = (_HERE / "test_gpu_faults.py", _AHEAD_OF_TIME)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What asks for compiled kernels comes last of this directory's tests, and the faults before that."""
    places = [index for index, item in enumerate(items) if _HERE in item.path.parents]
    in_order = sorted((items[index] for index in places), key=_turn)
    for index, item in zip(places, in_order, strict=True):
        items[index] = item


def _turn(item: pytest.Item) -> int:
    return _LAST.index(item.path) + 1 if item.path in _LAST else 0


@pytest.fixture(scope="session")
def compilations(request: pytest.FixtureRequest) -> Iterator[dict[str, "Future[Compiled]"]]:
    """By str(target), of the tests that were selected."""
    items = [item for item in request.session.items if item.path == _AHEAD_OF_TIME]
    parameters = [getattr(item, "callspec", None) for item in items]
    compilations = Compilations([callspec.params["target"] for callspec in parameters if callspec is not None])
    yield compilations.results
    compilations.stop()


@pytest.fixture(scope="session", autouse=True)
def _begin_to_compile(compilations: dict[str, "Future[Compiled]"]) -> None:
    """With the first test of this directory."""
