"""Items on their way to the workers: the core wants them, the workers prepare them and answer."""

import logging
from collections import deque

from protos import step_pb2
from scheduler.core.core import Core
from scheduler.core.messages import WantedItem
from scheduler.ranks.epochs import Event, ItemAnswered
from scheduler.ranks.workers import Workers
from scheduler.sessions.requests import Requests

log = logging.getLogger("octavo.scheduler")

# Items that ranks have not answered yet. More would only fill the queues on the way to them, where plans go as well.
_MOST_UNANSWERED = 16


class ItemFlow:
    """Sends the ranks that encode the items that the core wants, in its order, as soon as their bytes are here.

    Failures of the workers are returned as events, which the caller must handle at once.
    """

    def __init__(self, workers: Workers, requests: Requests) -> None:
        self._workers, self._requests = workers, requests
        # None before the first epoch.
        self._core: Core | None = None
        self._epoch = 0
        # Those that are not sent yet.
        self.waiting: deque[WantedItem] = deque()
        # The ranks that have not answered yet, and the first error, by number.
        self._unanswered: dict[int, set[int]] = {}
        self._errors: dict[int, str] = {}

    def begin_epoch(self, core: Core, epoch: int) -> None:
        """Begins an epoch: the workers have no items."""
        self._core, self._epoch = core, epoch

    def void(self) -> None:
        """Forgets what was sent, because the epoch has ended. The core will want the items again."""
        self.waiting.clear()
        self._unanswered.clear()
        self._errors.clear()

    def send(self, now: float) -> list[Event]:
        """Sends what can be sent now. Call it after plans have been made and sent."""
        core = self._core
        if core is None or not self._workers.is_ready:
            return []
        self.waiting.extend(core.take_wanted_items())
        events: list[Event] = []
        for _ in range(len(self.waiting)):
            if events or len(self._unanswered) >= _MOST_UNANSWERED:
                break
            item = self.waiting.popleft()
            data = self._requests.items.get(item.name)
            if not core.wants_item(item.number):
                core.item_failed(item.number, "the requests that need it have ended", now)
                continue
            if data is None:
                # Its router has been asked for it.
                self.waiting.append(item)
                continue
            self._unanswered[item.number] = set(self._workers.encoding_ranks)
            message = step_pb2.SchedulerToWorker(
                item=step_pb2.ItemToEncode(
                    epoch=self._epoch, number=item.number, data=data, num_embeddings=item.num_embeddings
                )
            )
            events = self._workers.send_item(message.SerializeToString())
        return events

    def take(self, answer: ItemAnswered, now: float) -> None:
        """Takes the answer of a rank. The core learns of it once all ranks have answered."""
        awaited, core = self._unanswered.get(answer.number), self._core
        if core is None or awaited is None or answer.rank not in awaited:
            log.warning("rank %d answers item %d, which it was not asked for", answer.rank, answer.number)
            return
        awaited.discard(answer.rank)
        if answer.error:
            self._errors.setdefault(answer.number, answer.error)
        if awaited:
            return
        del self._unanswered[answer.number]
        error = self._errors.pop(answer.number, "")
        if error:
            self._requests.collect_ends(core.item_failed(answer.number, error, now))
        else:
            core.item_prepared(answer.number)
