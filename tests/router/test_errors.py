"""The tree of errors matches its docstring's drawing, and each error maps to the status that it states."""

import re

import grpc

from router import errors
from router.errors import Draining, RequestError, status_of


def _tree(kind: type[RequestError]) -> set[type[RequestError]]:
    return {kind}.union(*(_tree(child) for child in kind.__subclasses__()))


def test_the_drawing_is_complete_and_states_the_statuses() -> None:
    assert errors.__doc__ is not None
    drawn = dict(re.findall(r"── (\w+) *([A-Z_]{5,})?", errors.__doc__))
    kinds = {kind.__name__: kind for kind in _tree(RequestError) - {RequestError}}
    assert drawn.keys() == kinds.keys()
    stated = {name: status for name, status in drawn.items() if status}
    assert stated == {name: kinds[name].status.name for name in stated}


def test_unforeseen_errors_tell_clients_nothing_of_our_insides() -> None:
    status, message = status_of(RuntimeError("/secret/path"))
    assert status is grpc.StatusCode.INTERNAL
    assert "secret" not in message


def test_a_status_message_fits_into_a_header() -> None:
    status, message = status_of(Draining("x" * 100_000))
    assert (status, len(message) <= 2000) == (grpc.StatusCode.UNAVAILABLE, True)
