"""A call whose arguments are not JSON in the output and become JSON on the way."""

from collections.abc import Callable

from router.parsing.deltas import Deltas
from router.parsing.source import Reading, Source


class ConvertedCall:
    """Begins with the first piece of its arguments: what comes before may still turn out to be no call.

    The source holds what it has taken since the last piece, so that nothing is lost where a call breaks.
    """

    __slots__ = ("_deltas", "_has_begun", "_source", "name")

    def __init__(self, source: Source, deltas: Deltas, name: str) -> None:
        self._source = source
        self._deltas = deltas
        self._has_begun = False
        self.name = name

    def emit(self, text: str) -> None:
        """A piece of the arguments, as JSON."""
        if not self._has_begun:
            self._has_begun = True
            self._deltas.begin_call(self.name)
        self._source.hold()
        self._deltas.arguments(text)


def items(
    source: Source, emit: Callable[[str], None], brackets: str, item: Callable[[], Reading[None]]
) -> Reading[None]:
    """Takes a list, or an object whose items are its entries, between two brackets; a comma may stand behind the last
    item. Raises Malformed."""
    opening, closing = brackets
    source.take(1)
    emit(opening)
    before = ""
    yield from source.spaces()
    while not (yield from source.one_of((closing,))):
        emit(before)
        before = ", "
        yield from item()
        yield from source.spaces()
        if not (yield from source.one_of((",",))):
            yield from source.expect(closing)
            break
        yield from source.spaces()
    emit(closing)
