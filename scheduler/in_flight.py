"""The plans whose results are outstanding, and what each is to bring."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from scheduler.request import Sequence


@dataclass(slots=True, kw_only=True)
class Awaited:
    """The sequences that sample in one plan, in batch order, as columns: the decodes, then some of the chunks."""

    step: int
    # Number of the stay, row, and position that the first sampled token will have, counted from the prompt's beginning.
    numbers: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    # `Decodes.version` if the columns are the first decodes, in order, as they were then; None: they are not.
    decodes_version: int | None
    # Draft tokens, by number of the stay.
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # Those that decode from then on, with the number of the stay.
    finishing: list[tuple[Sequence, int]] = field(default_factory=list)
    # Tokens of prefills that it computes.
    num_prefill_tokens: int = 0
    # Nothing is computed in it.
    is_empty: bool = False


class InFlight:
    """In the order of the plans, which is that of the results."""

    def __init__(self) -> None:
        self._awaited: deque[Awaited] = deque()

    def __iter__(self) -> Iterator[Awaited]:
        return iter(self._awaited)

    def __len__(self) -> int:
        return len(self._awaited)

    @property
    def last_step(self) -> int:
        """0: none is in flight."""
        return self._awaited[-1].step if self._awaited else 0

    @property
    def first_step(self) -> int:
        """Of the next result; 0: none is in flight."""
        return self._awaited[0].step if self._awaited else 0

    @property
    def is_computing(self) -> bool:
        """A step in flight computes something."""
        return any(not awaited.is_empty for awaited in self._awaited)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(awaited.num_prefill_tokens for awaited in self._awaited)

    def add(self, awaited: Awaited) -> None:
        self._awaited.append(awaited)

    def take(self, step: int) -> Awaited | None:
        """What the result of `step` is to bring; None if it is not the next one."""
        return self._awaited.popleft() if self._awaited and self._awaited[0].step == step else None

    def clear(self) -> None:
        self._awaited.clear()

    @property
    def numbers(self) -> set[int]:
        """Of the stays that something is awaited of."""
        return {number for awaited in self._awaited for number in awaited.numbers.tolist()}
