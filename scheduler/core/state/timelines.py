"""The timelines of live and recently finished requests, for `octavo explain`.

Entries record changes, never a decode step, so that their number hardly grows with the output.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator

from scheduler.core.messages import Moment, Timeline, TimelineEntry

# A very long timeline keeps its first and last entries: how it began, and where it is now. Together there is room for
# the four entries that each of 64 choices has at least.
_NUM_FIRST = _NUM_LAST = 128

# Moment's value, time, choice, step, num_tokens, reason.
Entry = tuple[str, float, int, int, int, str]


class _Record:
    """The entries of one group: plain tuples, because a hundred thousand groups may be waiting."""

    __slots__ = ("_first", "_last", "num_accepted_tokens", "num_draft_tokens", "num_dropped", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.num_dropped = 0
        # Speculation of the sequences that have finished.
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self._first: list[Entry] = []
        self._last: deque[Entry] | None = None  # made once `_first` is full

    def append(self, entry: Entry) -> None:
        if len(self._first) < _NUM_FIRST:
            self._first.append(entry)
            return
        if self._last is None:
            self._last = deque(maxlen=_NUM_LAST)
        self.num_dropped += len(self._last) == _NUM_LAST
        self._last.append(entry)

    def __iter__(self) -> Iterator[Entry]:
        yield from self._first
        yield from self._last or ()

    def timeline(self, *, is_finished: bool) -> Timeline:
        entries = tuple(
            TimelineEntry(
                moment=Moment(moment), time=time, choice=choice, step=step, num_tokens=num_tokens, reason=reason
            )
            for moment, time, choice, step, num_tokens, reason in self
        )
        return Timeline(
            request_id=self.request_id,
            entries=entries,
            num_dropped=self.num_dropped,
            is_finished=is_finished,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )


class Timelines:
    """The timelines of one core. A group begins, gets entries, and finishes; after that it may be forgotten."""

    def __init__(self, max_finished: int) -> None:
        """max_finished: number of finished groups to keep; those that finished first are dropped first."""
        self._live: dict[int, _Record] = {}
        self._max_finished = max_finished
        # By group, in the order in which they finished.
        self._finished: OrderedDict[int, _Record] = OrderedDict()

    def begin(self, group: int, request_id: str) -> None:
        """Begins a group, which must not be live."""
        assert group not in self._live, f"group {group} is live"
        self._live[group] = _Record(request_id)

    def add(
        self,
        group: int,
        moment: Moment,
        now: float,
        *,
        choice: int,
        step: int = 0,
        num_tokens: int = 0,
        reason: str = "",
    ) -> None:
        """Adds an entry for a choice of a live group. The arguments are the fields of TimelineEntry."""
        self._live[group].append((moment.value, now, choice, step, num_tokens, reason))

    def add_drafts(self, group: int, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Adds the drafts of a choice of a live group that has finished."""
        record = self._live[group]
        record.num_draft_tokens += num_draft_tokens
        record.num_accepted_tokens += num_accepted_tokens

    def finish(self, group: int) -> None:
        """Finishes a live group that has no sequences left. It gets no more entries."""
        self._finished[group] = self._live.pop(group)
        if len(self._finished) > self._max_finished:
            self._finished.popitem(last=False)

    def save(self, group: int) -> tuple[list[Entry], int]:
        """Returns the entries of a live group and how many were dropped, for `restore`."""
        record = self._live[group]
        return list(record), record.num_dropped

    def restore(self, group: int, request_id: str, entries: list[Entry], num_dropped: int) -> None:
        """Begins a group with what `save` returned."""
        self.begin(group, request_id)
        record = self._live[group]
        for entry in entries:
            record.append(entry)
        record.num_dropped = num_dropped

    def of(self, group: int) -> Timeline | None:
        """The timeline of a live or recently finished group; None if it is not known."""
        if (live := self._live.get(group)) is not None:
            return live.timeline(is_finished=False)
        finished = self._finished.get(group)
        return None if finished is None else finished.timeline(is_finished=True)

    def explain(self, request_id: str) -> list[Timeline]:
        """The timelines of all groups with this request id, oldest first. Looks at every group: too slow for a step."""
        found = [
            record.timeline(is_finished=True) for record in self._finished.values() if record.request_id == request_id
        ]
        found += [
            record.timeline(is_finished=False) for record in self._live.values() if record.request_id == request_id
        ]
        return sorted(found, key=lambda timeline: timeline.entries[0].time if timeline.entries else float("inf"))

    def check_integrity(self, live: Collection[int]) -> None:
        """Asserts that the live timelines are those of the `live` groups, and that none of them is empty."""
        assert self._live.keys() == set(live), "timelines and groups differ"
        assert all(any(True for _ in record) for record in self._live.values()), "a live group has no entries"
