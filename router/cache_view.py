"""What a router can know of a replica's prefix cache: the names of its blocks, from the cache events of its Session."""

from collections.abc import Iterable, Sequence

from protos.scheduler_pb2 import CacheEvent

_NAME_BYTES = 32


class CacheView:
    """One replica's known blocks, as the events received so far tell. Takes about 100 bytes a block.

    The view lags behind the cache, so what it says of a prompt is an estimate: good enough to choose a replica by.
    """

    def __init__(self, block_size: int, max_blocks: int) -> None:
        """max_blocks: more than the replica has can't be cached, so that its events can't fill this router's memory."""
        self.block_size = block_size
        self._max_blocks = max_blocks
        self._names: set[bytes] = set()

    def __len__(self) -> int:
        """Blocks known."""
        return len(self._names)

    def apply(self, events: Iterable[CacheEvent]) -> None:
        """Takes in events, in the order in which they came.

        Raises ValueError if no scheduler of ours could have sent them.
        """
        names = self._names
        for event in events:
            match event.WhichOneof("event"):
                case "stored":
                    if len(event.stored) != _NAME_BYTES:
                        raise ValueError(f"stored: {len(event.stored)} bytes; a block's name has {_NAME_BYTES}")
                    names.add(event.stored)
                    if len(names) > self._max_blocks:
                        raise ValueError(f"stored: more than the {self._max_blocks} blocks that the replica has")
                case "removed":
                    names.discard(event.removed)
                case "cleared":
                    names.clear()
                case _:
                    raise ValueError("a cache event holds none of the kinds known here")

    def num_cached_tokens(self, prompt_names: Sequence[bytes]) -> int:
        """Leading tokens of a prompt that the replica need not compute; prompt_names: runtime.block_names of it."""
        names, count = self._names, 0
        for name in prompt_names:
            if name not in names:
                break
            count += 1
        return count * self.block_size
