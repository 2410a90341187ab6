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
from worker.encoders.encoder import Encoder, ItemError, Prepared
from worker.errors import PlanError

_log = logging.getLogger("octavo.worker")


@dataclass(slots=True)
class _Item:
    message: step_pb2.ItemToEncode
    # None: not made yet, or dropped to save memory.
    prepared: Prepared | None = None
    is_ready: bool = False


class Preparations:
    """The items of an epoch that may be encoded: each one's files, and its input as long as there is memory for it.

    Inputs can take a hundred times the memory of the files. If they would be more than `most_bytes`, the oldest ones
    are dropped, and made again when a step encodes their items.
    """

    def __init__(self, encoder: Encoder, *, most_bytes: int) -> None:
        self._encoder, self._most_bytes = encoder, most_bytes
        # Guards what follows: one thread prepares, another computes steps, a third one receives messages.
        self._lock = threading.Lock()
        self._items: dict[int, _Item] = {}
        # Those with an input, the oldest first.
        self._with_input: OrderedDict[int, int] = OrderedDict()
        self._done: deque[tuple[int, str]] = deque()
        # Started by the first item; it inherits the cores of the thread that calls it.
        self._thread = ThreadPoolExecutor(1, "items")

    @property
    def num_bytes(self) -> int:
        """Bytes of the inputs that wait to be encoded."""
        with self._lock:
            return sum(self._with_input.values())

    def begin(self, message: step_pb2.ItemToEncode, when_done: Callable[[], None]) -> None:
        """Queues an item. when_done: called on another thread once `take_done` has an answer. Raises PlanError if the
        number is taken."""
        with self._lock:
            if message.number in self._items:
                raise PlanError(f"item: number {message.number} is taken; numbers are used once per epoch")
            item = self._items[message.number] = _Item(message)
        self._thread.submit(self._run, item, when_done)

    def take_done(self) -> list[tuple[int, str]]:
        """Returns the items that are prepared and not yet returned, each with its error, which is empty if it can be
        encoded."""
        with self._lock:
            done = [*self._done]
            self._done.clear()
        return done

    def input_of(self, number: int) -> Prepared:
        """Returns an item's input, and keeps it no longer. Raises PlanError if the item is not prepared."""
        with self._lock:
            item = self._items.get(number)
            if item is None or not item.is_ready:
                raise PlanError(f"encoded_items: item {number} is not prepared")
            prepared, item.prepared = item.prepared, None
            self._with_input.pop(number, None)
        return self._prepare(item.message) if prepared is None else prepared

    def forget(self, number: int) -> None:
        """Drops an item, if there is one of that number."""
        with self._lock:
            self._items.pop(number, None)
            self._with_input.pop(number, None)

    def clear(self) -> None:
        """Drops all items and answers: another epoch begins."""
        with self._lock:
            self._items.clear()
            self._with_input.clear()
            self._done.clear()

    def _run(self, item: _Item, when_done: Callable[[], None]) -> None:
        message, error, prepared = item.message, "", None
        with self._lock:
            if self._items.get(message.number) is not item:
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
            if self._items.get(message.number) is not item:
                return
            if prepared is None:
                del self._items[message.number]
            else:
                item.is_ready = True
                self._keep(item, prepared)
            self._done.append((message.number, error))
        when_done()

    def _keep(self, item: _Item, prepared: Prepared) -> None:
        item.prepared = prepared
        self._with_input[item.message.number] = prepared.num_bytes
        while len(self._with_input) > 1 and sum(self._with_input.values()) > self._most_bytes:
            oldest, _ = self._with_input.popitem(last=False)
            self._items[oldest].prepared = None

    def _prepare(self, message: step_pb2.ItemToEncode) -> Prepared:
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
