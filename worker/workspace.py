"""Memory for the intermediate results of a forward pass, kept from step to step."""

import torch

from kernels.compute_path import ComputePath


class Workspace:
    """Buffers by name, all for the same number of rows.

    A buffer stays where it is until more rows are reserved than ever before: `memory` is then another object.
    """

    def __init__(self, path: ComputePath) -> None:
        self._device = path.device
        # Of what linears and attention give. PyTorch's on a CPU put it elsewhere.
        self._dtype = torch.float32 if path.gpu is None else path.compute_dtype
        # On a GPU a batch may end in padding, for which attention leaves its result as it was. Whatever that is goes
        # through the layers, and is to be finite.
        self._new = torch.empty if path.gpu is None else torch.zeros
        self._num_rows = 0
        self._buffers: dict[str, torch.Tensor] = {}
        # What was taken last of each buffer: in most steps as much as in the one before.
        self._taken: dict[str, torch.Tensor] = {}

    @property
    def memory(self) -> object:
        """The same object as long as every buffer stays where it is."""
        return self._buffers

    def reserve(self, num_rows: int) -> None:
        """Makes room for so many rows. All buffers are lost if there was less."""
        if num_rows > self._num_rows:
            # Powers of 2, so that batches that grow row by row do not get new memory each time. On a GPU the most rows
            # that there will be are reserved at once.
            self._num_rows = num_rows if self._device.type == "cuda" else 1 << (num_rows - 1).bit_length()
            self._buffers, self._taken = {}, {}

    def take(self, name: str, num_rows: int, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The first num_rows rows of a buffer, [num_rows, *shape] and contiguous, with whatever was last put there.
        Shape and dtype are the name's; None: as linears and attention give it."""
        taken = self._taken.get(name)
        if taken is not None and len(taken) == num_rows:
            return taken
        assert num_rows <= self._num_rows, "rows are reserved first"
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._new(self._num_rows, *shape, dtype=dtype or self._dtype, device=self._device)
            self._buffers[name] = buffer
        assert buffer.shape[1:] == shape
        assert buffer.dtype is (dtype or self._dtype)
        self._taken[name] = taken = buffer[:num_rows]
        return taken
