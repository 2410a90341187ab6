"""What a step calls of the kernels, run again without the Python that made the calls."""

from collections.abc import Callable
from operator import is_

import torch

from kernels.compute_path import ComputePath
from kernels.native.recording import Recording


class Replay:
    """Records the kernel calls of one step, and makes them again in the following ones.

    With PyTorch's kernels there is nothing to record, and Python makes each call in each step; so it does if steps
    differ in more than their numbers.
    """

    def __init__(self, path: ComputePath, *, records: bool = True) -> None:
        self._kernels = path.native if records else None
        self._memory: tuple[object, ...] = ()
        self._recording: Recording | None = None

    def run(self, body: Callable[[], object], num_tokens: int, *, memory: tuple[object, ...]) -> None:
        """body: makes the same kernel calls for any number of tokens, and does nothing else; what it passes to them has
        the same addresses as long as `memory` holds the same objects."""
        if self._kernels is not None and self._recording is not None and all(map(is_, memory, self._memory)):
            self._kernels.replay(self._recording, num_tokens)
            return
        # Not around whole steps: entering and leaving it takes 50 us when the weights have just emptied the caches.
        with torch.inference_mode():
            if self._kernels is None:
                body()
                return
            with self._kernels.recording() as recording:
                body()
        self._recording, self._memory = recording, memory
