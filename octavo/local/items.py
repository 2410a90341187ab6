"""Images and videos of the requests of an engine: prepared beside its steps, in this process."""

import threading
from collections.abc import Sequence

from octavo.client.errors import InvalidRequest
from protos import step_pb2
from runtime.media.packed import PackedItem
from scheduler.core.core import Core
from scheduler.core.messages import SequenceEnd, WantedItem
from worker.step.runner import PreparesItems


class ItemFlow:
    """Hands the runner the items that the core wants, and tells the core which are prepared."""

    def __init__(self, core: Core, runner: PreparesItems | None) -> None:
        """runner: None: the model takes no items."""
        self._core, self._runner = core, runner
        # By name, while a group needs them.
        self._files: dict[bytes, PackedItem] = {}
        self._num_needing: dict[bytes, int] = {}
        self._names: dict[int, Sequence[bytes]] = {}
        self._num_unanswered = 0
        self._answered = threading.Event()

    def add(self, group: int, files: Sequence[PackedItem]) -> None:
        """Holds the items of a group until `remove`. Raises InvalidRequest."""
        if not files:
            return
        if self._runner is None:
            raise InvalidRequest(f"the request has {len(files)} images or videos, and this model takes text only")
        self._names[group] = [each.name for each in files]
        for each in files:
            self._files.setdefault(each.name, each)
            self._num_needing[each.name] = self._num_needing.get(each.name, 0) + 1

    def remove(self, group: int) -> None:
        """Lets go of a group's items, if it has any."""
        for name in self._names.pop(group, ()):
            self._num_needing[name] -= 1
            if not self._num_needing[name]:
                del self._num_needing[name], self._files[name]

    @property
    def is_waiting(self) -> bool:
        """True while items are being prepared."""
        return self._num_unanswered > 0

    def wait(self) -> None:
        """Waits until an item is prepared, if any is under way."""
        if self._num_unanswered:
            self._answered.wait()

    def exchange(self, now: float) -> list[SequenceEnd]:
        """Takes the runner's answers, and hands over what the core wants now. Returns the ends of sequences whose items
        can't be prepared. Call it after `Core.submit` and `Core.schedule`."""
        runner = self._runner
        if runner is None:
            return []
        ends: list[SequenceEnd] = []
        self._answered.clear()
        for number, error in runner.take_done():
            self._num_unanswered -= 1
            if error:
                ends += self._core.item_failed(number, error, now)
            else:
                self._core.item_prepared(number)
        for wanted in self._core.take_wanted_items():
            self._prepare(runner, wanted, now)
        return ends

    def _prepare(self, runner: PreparesItems, wanted: WantedItem, now: float) -> None:
        if not self._core.wants_item(wanted.number):
            self._core.item_failed(wanted.number, "the requests that need it have ended", now)
            return
        data = b"".join(self._files[wanted.name].pieces)
        message = step_pb2.ItemToEncode(number=wanted.number, data=data, num_embeddings=wanted.num_embeddings)
        self._num_unanswered += 1
        runner.prepare(message, self._answered.set)
