"""Makes inputs of encoders from items' files, on a thread beside the steps."""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from protos import step_pb2
from protos.inference_pb2 import ItemData
from worker.encoders.encoder import Encoder, ItemError, Pixels
from worker.errors import PlanError

_log = logging.getLogger("octavo.worker")


@dataclass(slots=True, eq=False)
class _Item:
    message: step_pb2.ItemToEncode
    # None: not made yet, or dropped to save memory.
    prepared: Pixels | None = None
    is_ready: bool = False


class Preparations:
    """The items of an epoch that may be encoded: each one's files, and its input as long as there is memory for it.

    Inputs can take a hundred times the memory of the files. If they would be more than `most_bytes`, the least
    recently used ones are dropped, and made again when a step encodes their items.
    """

    def __init__(self, encoder: Encoder, *, most_bytes: int) -> None:
        self._encoder, self._most_bytes = encoder, most_bytes
        # Guards what follows: one thread prepares, another computes steps, a third one receives messages.
        self._lock = threading.Lock()
        # By number. Of several, a plan that is still to be computed forgets all but the last.
        self._items: dict[int, deque[_Item]] = {}
        # Those with an input, the least recently used first.
        self._with_input: OrderedDict[int, _Item] = OrderedDict()
        self._done: deque[tuple[int, str]] = deque()
        # Started by the first item; it inherits the cores of the thread that calls it.
        self._thread = ThreadPoolExecutor(1, "items")

    @property
    def num_bytes(self) -> int:
        """Bytes of the inputs."""
        with self._lock:
            return self._num_bytes()

    def begin(self, message: step_pb2.ItemToEncode, when_done: Callable[[], None]) -> None:
        """Queues an item. when_done: called on another thread once `take_done` has an answer. An item that was
        forgotten may come again under its number."""
        item = _Item(message)
        with self._lock:
            self._items.setdefault(message.number, deque()).append(item)
        self._thread.submit(self._run, item, when_done)

    def take_done(self) -> list[tuple[int, str]]:
        """Returns the items that are prepared and not yet returned, each with its error, which is empty if it can be
        encoded."""
        with self._lock:
            done = [*self._done]
            self._done.clear()
        return done

    def input_of(self, number: int) -> Pixels:
        """Returns an item's input. Raises PlanError if the item is not prepared."""
        with self._lock:
            item = next(iter(self._items.get(number, ())), None)
            if item is None or not item.is_ready:
                raise PlanError(f"encoded_items: item {number} is not prepared")
            if item.prepared is not None:
                self._with_input.move_to_end(id(item))
                return item.prepared
        prepared = self._prepare(item.message)
        with self._lock:
            if self._is_live(item):
                self._keep(item, prepared)
        return prepared

    def forget(self, number: int) -> None:
        """Drops an item, if there is one of that number."""
        with self._lock:
            items = self._items.get(number)
            if not items:
                return
            self._with_input.pop(id(items.popleft()), None)
            if not items:
                del self._items[number]

    def clear(self) -> None:
        """Drops all items and answers: another epoch begins."""
        with self._lock:
            self._items.clear()
            self._with_input.clear()
            self._done.clear()

    def _run(self, item: _Item, when_done: Callable[[], None]) -> None:
        message, error, prepared = item.message, "", None
        with self._lock:
            if not self._is_live(item):
                return
        try:
            prepared = self._prepare(message)
        except ItemError as why:
            error = str(why)
        except Exception as why:  # noqa: BLE001 - one item must not end the requests of all others
            _log.exception("item %d can't be prepared", message.number)
            error = f"the item can't be prepared: {type(why).__name__}: {why}"
        with self._lock:
            # It may have been forgotten, or another epoch may have begun.
            if not self._is_live(item):
                return
            if prepared is None:
                self._items[message.number].remove(item)
            else:
                item.is_ready = True
                self._keep(item, prepared)
            self._done.append((message.number, error))
        when_done()

    def _is_live(self, item: _Item) -> bool:
        return any(each is item for each in self._items.get(item.message.number, ()))

    def _keep(self, item: _Item, prepared: Pixels) -> None:
        item.prepared = prepared
        self._with_input[id(item)] = item
        while len(self._with_input) > 1 and self._num_bytes() > self._most_bytes:
            _, oldest = self._with_input.popitem(last=False)
            oldest.prepared = None

    def _num_bytes(self) -> int:
        return sum(item.prepared.num_bytes for item in self._with_input.values() if item.prepared is not None)

    def _prepare(self, message: step_pb2.ItemToEncode) -> Pixels:
        try:
            data = ItemData.FromString(message.data)
        except DecodeError:
            raise ItemError(f"{len(message.data)} bytes of an item are not an ItemData") from None
        prepared = self._encoder.prepare(data)
        if prepared.num_embeddings != message.num_embeddings:
            raise ItemError(
                f"the item has {prepared.num_embeddings} embeddings, and the router has counted "
                f"{message.num_embeddings}: give routers and workers the same model"
            )
        return prepared
