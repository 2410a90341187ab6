"""A forward pass as graphs of what lies between its attentions, for steps of any rows."""

from collections.abc import Callable

import torch

from worker.gpu.device import Device, Graph


class CapturedPieces:
    """worker.forward_context.Pieces of one size, for a model's forward.

    Attention's work depends on a step's rows, so it is launched by Python in each step, under the step's own
    ForwardContext; all else depends on the number of tokens alone. What passes from a piece to attention and back is in
    the model's workspace, which stays in place. What a piece allocates beside it is in the graphs' pool, and may be
    used again by the next piece: in each step they run in the order in which they were captured.
    """

    def __init__(self, device: Device, pool: object) -> None:
        self._device, self._pool = device, pool
        self._graph: Graph | None = None

    def run(self, body: Callable[[], object]) -> None:
        """The first call captures what `body` does, and computes nothing that counts; those that follow replay it."""
        if self._graph is None:
            self._graph = self._device.capture_pieces(body, self._pool)
        else:
            self._graph.replay()

    def between_graphs(self, attend: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self._device.between_graphs(attend)
