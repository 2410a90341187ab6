"""The items of prompts (images, videos): what the workers have prepared of them, and the cache of their embeddings.

An item's embeddings must be in the workers' cache in every step that computes a token of it. A sequence holds them from
the plan that first needs them to the plan that computes the last of the item's tokens. What is not held stays until
others need the room; the least recently used embeddings go first.

Between two plans a sequence holds one item at most, the one whose tokens it is in the middle of, and needs no room in
the cache to get past it. So nothing waits in a circle. Room goes by order: while a sequence lacks room, those behind it
encode nothing.

The workers keep an item's input, decoded and resized, while a sequence may need it encoded. It is asked for ahead of
time as far as the window goes, and at the latest when the item's sequence comes to the head of the queue.
"""

from collections import OrderedDict
from collections.abc import Iterable

from scheduler.core.messages import CoreSettings, CoreStats, Plan, WantedItem
from scheduler.core.pacing.pace import StepLimit
from scheduler.core.state.request import Group, Item, ItemInput, Sequence

# The embeddings of items whose input the workers have, or are asked for, before the items' turn: so many times
# encoder_cache_size. An input takes one to two times the memory of its embeddings.
_WINDOW = 2

# Number, name, num_embeddings, is_cached, input.
SavedItem = tuple[int, bytes, int, bool, str]


class Items:
    """The items of live groups, and those whose embeddings the workers keep."""

    def __init__(self, settings: CoreSettings, stats: CoreStats) -> None:
        # Set anew by `restore` of a snapshot.
        self.stats = stats
        # Embeddings that a step encodes at most, and the plan being made.
        self._most_encoded = self._budget = settings.max_num_encoder_input_tokens
        # Prefills are whole: all items of one are encoded in one step.
        self._is_whole = not settings.enable_chunked_prefill
        # By name and number of embeddings: a request that is wrong about the latter shares nothing with others.
        self._items: dict[tuple[bytes, int], Item] = {}
        self._by_number: dict[int, Item] = {}
        # Numbers given out so far, counted from 1.
        self.num_numbers = 0
        # False: there is nothing to do for a plan. Kept as a value, because every step looks at it.
        self.is_used = False
        # For `take_wanted`; read only for callers.
        self.wanted: list[Item] = []
        # Since the last plan, and in the plan being made. Numbers of items; the first as the keys.
        self._forgotten: dict[int, None] = {}
        self._dropped: list[int] = []
        self._encoded: list[int] = []
        # Embeddings that the plan being made encodes.
        self._num_encoded = 0
        # Items whose tokens the plan being made computes to the end, once for each span.
        self._passed: list[Item] = []
        # A sequence lacks room in the plan being made.
        self._is_full = False
        self.reset(settings.encoder_cache_size)

    def reset(self, cache_size: int) -> None:
        """Begins an epoch: the workers have lost all inputs and embeddings. No sequence may run."""
        self._size = cache_size
        # Embeddings of the items in the cache, of those that are held, and of those that have an input.
        self._num_cached = self._num_held = self._num_with_input = 0
        # Cached and not held; least recently used first.
        self._unheld: OrderedDict[int, Item] = OrderedDict()
        self._forgotten.clear()
        for item in list(self._items.values()):
            item.is_cached, item.input = False, ItemInput.ABSENT
            self._remove_if_unused(item)
        self.wanted.clear()
        self._dropped.clear()
        self._encoded.clear()
        self._passed.clear()

    # --- Groups and sequences

    def add(self, group: Group) -> None:
        """Adds the items of a group, which all its sequences need."""
        items = []
        for span in group.request.items:
            item = self._items.get((span.name, span.num_embeddings))
            if item is None:
                self.num_numbers += 1
                item = Item(self.num_numbers, span.name, span.num_embeddings)
                self._items[item.key] = self._by_number[item.number] = item
            item.num_groups += 1
            item.num_needing += len(group.sequences)
            items.append(item)
        group.items = tuple(items)
        self.is_used = True

    def remove(self, group: Group) -> None:
        """Removes the items of a group that has ended."""
        for item in group.items:
            item.num_groups -= 1
            self._remove_if_unused(item)

    def leave(self, sequence: Sequence) -> None:
        """Notes that a sequence ends: it needs no item any more."""
        self._release_held(sequence)
        for item in sequence.group.items[sequence.next_item :]:
            self._need_no_more(item)
        sequence.next_item = len(sequence.group.items)

    def put_back(self, sequence: Sequence) -> None:
        """Notes that a sequence has lost its blocks: it may need all of its items again."""
        self._release_held(sequence)
        for item in sequence.group.items[: sequence.next_item]:
            item.num_needing += 1
        sequence.next_item = 0

    def skip(self, sequence: Sequence, num_found: int) -> None:
        """Notes that a sequence begins to run, with the KV of its first num_found tokens."""
        spans, items = sequence.group.request.items, sequence.group.items
        while sequence.next_item < len(items) and spans[sequence.next_item].end <= num_found:
            self._need_no_more(items[sequence.next_item])
            sequence.next_item += 1

    def _release_held(self, sequence: Sequence) -> None:
        if sequence.holds_item:
            sequence.holds_item = False
            self._release(sequence.group.items[sequence.next_item])

    # --- Inputs

    def are_ready(self, sequence: Sequence, num_found: int, *, is_first: bool) -> bool:
        """True if a waiting sequence, of which num_found tokens are there, has all items that it needs. Otherwise asks
        for them: as far as the window goes, or beyond it if is_first."""
        are_ready = True
        for span, item in zip(sequence.group.request.items, sequence.group.items, strict=True):
            if span.end > num_found and not item.is_cached and item.input is not ItemInput.PREPARED:
                self._ask(item, is_first=is_first)
                are_ready &= item.input is ItemInput.PREPARED
        return are_ready

    def are_all_there(self, group: Group) -> bool:
        """True if all items of a group are prepared, or have their embeddings in the cache."""
        return all(item.is_cached or item.input is ItemInput.PREPARED for item in group.items)

    def _ask(self, item: Item, *, is_first: bool) -> None:
        if item.input is not ItemInput.ABSENT:
            return
        if not is_first and self._num_with_input + item.num_embeddings > _WINDOW * self._size:
            return
        self._num_with_input += item.num_embeddings
        if item.number in self._forgotten:
            # The workers have not been told to forget it yet.
            del self._forgotten[item.number]
            item.input = ItemInput.PREPARED
            return
        item.input = ItemInput.ASKED
        self.wanted.append(item)

    def take_wanted(self) -> list[WantedItem]:
        """Returns the items that were asked for since the last call."""
        wanted, self.wanted = self.wanted, []
        return [WantedItem(number=item.number, name=item.name, num_embeddings=item.num_embeddings) for item in wanted]

    def asked(self, number: int) -> Item | None:
        """The item that was asked for by this number and has not come yet."""
        item = self._by_number.get(number)
        return item if item is not None and item.input is ItemInput.ASKED else None

    def prepared(self, item: Item) -> None:
        """Notes that the workers have prepared an item that was asked for."""
        item.input = ItemInput.PREPARED
        self._forget_if_unneeded(item)

    def failed(self, item: Item) -> None:
        """Notes that the workers can't prepare an item that was asked for."""
        self._lose_input(item)
        self._remove_if_unused(item)

    def _need_no_more(self, item: Item) -> None:
        item.num_needing -= 1
        self._forget_if_unneeded(item)

    def _forget_if_unneeded(self, item: Item) -> None:
        # What is still being prepared is forgotten when it is done: no answer of the workers is then on its way.
        if not item.num_needing and item.input is ItemInput.PREPARED:
            self._lose_input(item)
            # Stays until a plan says so: it may be needed again before that.
            self._forgotten[item.number] = None

    def _lose_input(self, item: Item) -> None:
        item.input = ItemInput.ABSENT
        self._num_with_input -= item.num_embeddings

    def _remove_if_unused(self, item: Item) -> None:
        is_needed = item.num_groups or item.is_cached or item.input is not ItemInput.ABSENT
        if not is_needed and item.number not in self._forgotten:
            del self._items[item.key], self._by_number[item.number]

    # --- Plans

    def begin_plan(self) -> None:
        self._num_encoded, self._is_full, self._budget = 0, False, self._most_encoded

    @property
    def num_encoded(self) -> int:
        """Embeddings that the plan being made encodes so far. Counts only while `is_used`."""
        return self._num_encoded

    def limit(self, num_embeddings: int) -> None:
        """Lets the plan being made encode no more than that. One item alone may have more."""
        self._budget = min(self._budget, num_embeddings)

    def _num_lacking(self, sequence: Sequence, start: int, count: int) -> int:
        """Embeddings that must be encoded before a sequence's `count` tokens from position `start` on are computed."""
        spans, items = sequence.group.request.items, sequence.group.items
        lacking = {
            item.number: item.num_embeddings
            for item, span in zip(items, spans, strict=True)
            if not item.is_cached and span.end > start and span.first_token < start + count
        }
        return sum(lacking.values())

    def count(self, sequence: Sequence, start: int, count: int, limit: StepLimit | None = None) -> int:
        """How many of a sequence's `count` tokens from position `start` on can be computed in the plan being made.

        The tokens of an item can, if its embeddings are there, or if it is prepared and there is room: in the cache,
        and in what one step encodes. One item alone may have more than that. limit: the time for both.
        """
        kept = self._count(sequence, start, count)
        return kept if limit is None else min(kept, limit.num_tokens(start, self._num_lacking(sequence, start, kept)))

    def _count(self, sequence: Sequence, start: int, count: int) -> int:
        spans, items, end = sequence.group.request.items, sequence.group.items, start + count
        index, room, num_encoded = sequence.next_item, self._size - self._num_held, self._num_encoded
        taken: set[int] = set()
        while index < len(items) and spans[index].first_token < end:
            item = items[index]
            if spans[index].end <= start or item.num_holders or item.number in taken:
                index += 1
                continue
            if not item.is_cached:
                if item.input is not ItemInput.PREPARED:
                    self._ask(item, is_first=True)
                    break
                before = self._num_encoded if self._is_whole else num_encoded
                num_encoded += item.num_embeddings
                self._is_full |= bool(before) and num_encoded > self._budget
                if self._is_full:
                    break
            room -= item.num_embeddings
            if room < 0:
                self._is_full = True
                break
            taken.add(item.number)
            index += 1
        else:
            return count
        return 0 if self._is_whole else max(0, spans[index].first_token - start)

    def take(self, sequence: Sequence, end: int, limit: StepLimit | None = None) -> None:
        """Holds the items of a sequence's next tokens, up to position `end`, and encodes those that lack embeddings.
        `count` has found that there is room. limit: loses the time of encoding."""
        spans, items, first = sequence.group.request.items, sequence.group.items, sequence.next_item
        index, lacking = first, []
        while index < len(items) and spans[index].first_token < end:
            if index > first or not sequence.holds_item:
                item = items[index]
                self._hold(item)
                self.stats.num_item_queries += 1
                self.stats.num_item_hits += item.is_cached
                if not item.is_cached and item not in lacking:
                    lacking.append(item)
            index += 1
        for item in lacking:
            self._encode(item)
        if limit is not None:
            limit.note_encoded(self._num_encoded)
        while sequence.next_item < index and spans[sequence.next_item].end <= end:
            self._passed.append(items[sequence.next_item])
            sequence.next_item += 1
        sequence.holds_item = sequence.next_item < index

    def finish_plan(self, plan: Plan) -> None:
        """Adds to a plan what it says of items."""
        plan.dropped_items, self._dropped = self._dropped, []
        plan.forgotten_items, self._forgotten = list(self._forgotten), {}
        plan.encoded_items, self._encoded = self._encoded, []
        for number in plan.forgotten_items:
            self._remove_if_unused(self._by_number[number])
        passed, self._passed = self._passed, []
        # What comes of this is for the next plan: this one still needs the items.
        for item in passed:
            self._release(item)
            self._need_no_more(item)
        self.is_used = bool(self._items)

    def _hold(self, item: Item) -> None:
        item.num_holders += 1
        if item.num_holders == 1:
            self._num_held += item.num_embeddings
            self._unheld.pop(item.number, None)

    def _release(self, item: Item) -> None:
        item.num_holders -= 1
        if not item.num_holders:
            self._num_held -= item.num_embeddings
            self._unheld[item.number] = item

    def _encode(self, item: Item) -> None:
        while self._num_cached + item.num_embeddings > self._size:
            _, evicted = self._unheld.popitem(last=False)
            evicted.is_cached = False
            self._num_cached -= evicted.num_embeddings
            self._dropped.append(evicted.number)
            self._remove_if_unused(evicted)
        assert item.input is ItemInput.PREPARED
        item.is_cached = True
        self._num_cached += item.num_embeddings
        self._encoded.append(item.number)
        self._num_encoded += item.num_embeddings
        self.stats.num_encoded_embeddings += item.num_embeddings

    # --- Snapshots

    def save(self) -> tuple[list[SavedItem], list[int], list[int]]:
        """Returns the items, the unheld ones in their order, and those that no plan has called forgotten yet."""
        items = [
            (item.number, item.name, item.num_embeddings, item.is_cached, item.input.value)
            for item in self._items.values()
        ]
        return items, list(self._unheld), list(self._forgotten)

    def restore(
        self, items: Iterable[SavedItem], unheld: list[int], forgotten: list[int], groups: Iterable[Group]
    ) -> None:
        """Takes what `save` returned, and the groups with their sequences."""
        for number, name, num_embeddings, is_cached, state in items:
            item = Item(number, name, num_embeddings)
            item.is_cached, item.input = is_cached, ItemInput(state)
            self._items[item.key] = self._by_number[number] = item
            self._num_cached += num_embeddings * is_cached
            self._num_with_input += num_embeddings * (item.input is not ItemInput.ABSENT)
        self._forgotten = dict.fromkeys(forgotten)
        for group in groups:
            group.items = tuple(self._items[span.name, span.num_embeddings] for span in group.request.items)
            for item in group.items:
                item.num_groups += 1
            for sequence in group.sequences.values():
                for item in group.items[sequence.next_item :]:
                    item.num_needing += 1
                if sequence.holds_item:
                    self._hold(group.items[sequence.next_item])
        self._unheld = OrderedDict((number, self._by_number[number]) for number in unheld)
        self.is_used = bool(self._items)

    # --- Integrity

    def check_integrity(self, groups: Iterable[Group]) -> None:
        """Asserts that all counts agree with the groups and their sequences. Between two plans only."""
        live = list(groups)
        for item in self._items.values():
            spans = [
                (sequence, index)
                for group in live
                for sequence in group.sequences.values()
                for index, each in enumerate(group.items)
                if each is item
            ]
            assert item.num_groups == sum(each is item for group in live for each in group.items)
            assert item.num_needing == sum(index >= sequence.next_item for sequence, index in spans)
            assert item.num_holders == sum(index == s.next_item and s.holds_item for s, index in spans)
            assert item.is_cached or not item.num_holders, "an item is held that is not in the cache"
            assert (item.number in self._unheld) == (item.is_cached and not item.num_holders)
            is_needed = item.num_groups or item.is_cached or item.input is not ItemInput.ABSENT
            assert is_needed or item.number in self._forgotten, "an unused item stays"
            assert item.num_needing or item.input is not ItemInput.PREPARED, "an input stays that nothing needs"
        assert self._by_number == {item.number: item for item in self._items.values()}
        assert all(item is self._items.get(item.key) for group in live for item in group.items)
        items = self._items.values()
        assert self._num_cached == sum(item.num_embeddings for item in items if item.is_cached)
        assert self._num_held == sum(item.num_embeddings for item in items if item.num_holders)
        assert self._num_with_input == sum(i.num_embeddings for i in items if i.input is not ItemInput.ABSENT)
        assert self._num_cached <= self._size, "the cache of embeddings is overfull"
        assert not self._passed
        assert not self._encoded
        assert self.is_used or not self._items
        for group in live:
            for sequence in group.sequences.values():
                if sequence.row < 0:
                    assert not sequence.holds_item
                    assert not sequence.next_item, "a waiting sequence would miss an item"
                elif group.items and not sequence.is_decoding:
                    ends = [span.end for span in group.request.items]
                    assert sequence.next_item == sum(end <= sequence.num_computed_tokens for end in ends)
