"""Recent outputs of each tenant and cache_salt, from which its later requests draft, and how long outputs get."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from scheduler.core.drafting.lookup import Lookup
from scheduler.core.drafting.texts import NewTokens, Texts

# Outputs that are known, at most.
_MOST_KNOWN = 256
# An output that is longer than all others goes on as long as few of them ended near its length, from this share of it.
_NEAR = 2 / 3


class OutputLengths:
    """Estimates the length of outputs from those that ended lately."""

    def __init__(self) -> None:
        # In the order of their ends, the oldest first, and from the shortest to the longest.
        self._lengths: list[int] = []
        self._sorted = np.zeros(0)
        # The sum of the shortest i.
        self._sums = np.zeros(1)

    def add(self, length: int) -> None:
        self.restore([*self._lengths[1 - _MOST_KNOWN :], length])

    def coming(self, lengths_L: np.ndarray) -> np.ndarray:
        """float64 [L]: the number of tokens that outputs of these lengths should still get.

        The mean of (final length - length) over the recorded outputs that got longer, and of one more value: length /
        (1 + recorded outputs that ended shortly before this length). Without records it is the length itself.
        """
        first_L = self._sorted.searchsorted(_NEAR * lengths_L, "right")
        last_L = self._sorted.searchsorted(lengths_L, "right")
        num_longer_L = len(self._sorted) - last_L
        tokens_L = self._sums[-1] - self._sums[last_L] - num_longer_L * lengths_L
        return (tokens_L + lengths_L / (last_L - first_L + 1)) / (num_longer_L + 1)

    def save(self) -> list[int]:
        return list(self._lengths)

    def restore(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self._sorted = np.sort(np.array(lengths, np.float64))
        self._sums = np.append(0.0, self._sorted.cumsum())


# (tenant, cache_salt)
Scope = tuple[str, str]
# Stands after each output; no token has this number.
_END = np.array([-1], np.int32)
# Scopes whose outputs are kept; the least recently used is forgotten.
MOST_SCOPES = 32
# Shorter ones have nothing to copy.
_LEAST_TOKENS = 8


class RecentOutputs:
    """Each scope has a lane behind those of the rows."""

    def __init__(self, texts: Texts, lookup: Lookup, first_lane: int, max_outputs: int) -> None:
        self._texts, self._lookup, self._max_outputs = texts, lookup, max_outputs
        self._free = list(range(first_lane + MOST_SCOPES - 1, first_lane - 1, -1))
        # The least recently used scope first.
        self._lanes: dict[Scope, int] = {}
        # By lane: (end position in its text, output).
        self._outputs: dict[int, deque[tuple[int, np.ndarray]]] = {}

    def lane_of(self, scope: Scope) -> int:
        """The lane of a scope; -1 if nothing of it is kept."""
        return self._lanes.get(scope, -1)

    def add(self, scope: Scope, token_ids: np.ndarray) -> int:
        """Adds an output (int32). Returns the lane of its scope; -1 if it was too short."""
        if len(token_ids) < _LEAST_TOKENS:
            return self.lane_of(scope)
        lane = self._lanes.pop(scope, None)
        if lane is None:
            lane = self._free.pop() if self._free else self._forget_oldest()
            self._outputs[lane] = deque()
            self._rebuild(lane)
        self._lanes[scope] = lane
        outputs, texts = self._outputs[lane], self._texts
        text = np.append(token_ids[-(texts.width // 2) :], _END)
        if texts.ends_L[lane] + len(text) > texts.max_len:
            outputs.append((0, text))
            self._drop_old(lane, int(sum(len(each) for _, each in outputs)))
            self._rebuild(lane)
        else:
            new = NewTokens(np.array([lane]), text, np.array([len(text)]))
            positions = texts.append(new)
            self._lookup.add(new.rows_T[:-1], positions[:-1], counted=True)
            outputs.append((int(texts.ends_L[lane]), text))
            self._drop_old(lane, int(texts.ends_L[lane]))
        return lane

    def _drop_old(self, lane: int, end: int) -> None:
        """Drops the outputs beyond the bound, and those that the ring no longer holds."""
        outputs, size = self._outputs[lane], 0
        for index, (_, text) in enumerate(reversed(outputs), 1):
            size += len(text)
            if index > self._max_outputs or size > self._texts.width // 2 + 1:
                for _ in range(len(outputs) - index + 1):
                    outputs.popleft()
                break
        if outputs:
            first_end, first = outputs[0]
            self._texts.starts_L[lane] = max(self._texts.starts_L[lane], first_end - len(first))

    def _forget_oldest(self) -> int:
        scope = next(iter(self._lanes))
        return self._lanes.pop(scope)

    def _rebuild(self, lane: int) -> None:
        end, outputs = 0, self._outputs[lane]
        for index, (_, text) in enumerate(outputs):
            end += len(text)
            outputs[index] = (end, text)
        text = np.concatenate([text for _, text in outputs]) if outputs else np.zeros(0, np.int32)
        positions = self._texts.begin(lane, text)
        # No context is followed by the end of an output.
        self._lookup.begin(lane, positions[text[len(text) - len(positions) :] >= 0], counted=True)

    # --- Snapshots

    def save(self) -> list[tuple[str, str, list[list[int]]]]:
        """Returns the outputs by scope, for `restore`, and begins all lanes anew, as `restore` does."""
        for lane in self._lanes.values():
            self._rebuild(lane)
        return [
            (*scope, [text[:-1].tolist() for _, text in self._outputs[lane]]) for scope, lane in self._lanes.items()
        ]

    def restore(self, saved: list[tuple[str, str, list[list[int]]]]) -> None:
        for tenant, salt, outputs in saved:
            lane = self._free.pop()
            self._lanes[tenant, salt] = lane
            self._outputs[lane] = deque((0, np.append(np.array(each, np.int32), _END)) for each in outputs)
            self._rebuild(lane)
