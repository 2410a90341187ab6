"""The expert that computes every token, in addition to those that a router chooses (DeepSeekMoE, arXiv 2401.06066).

Legend: T tokens, E hidden size, F intermediate size.
"""

import torch

from kernels.backend import Backend
from kernels.linear import PackedLinear, Residual, Stream
from kernels.moe.routing.torch_cpu import sigmoid
from worker.layers.forward_context import current
from worker.layers.linear import load_linear
from worker.weights.reader import WeightReader


class SharedExpert:
    """down(silu(gate(h)) * up(h)), with the same h as the mixture's experts, or that times the sigmoid of a linear
    layer with one output. Each rank has a part of F."""

    def __init__(
        self, intermediate_size: int, prefix: str, reader: WeightReader, backend: Backend, *, has_gate: bool = False
    ) -> None:
        """prefix: that of its tensors, such as model.layers.3.mlp.shared_experts. has_gate: see above; its tensor is
        named like the prefix, with _gate."""
        self._on_gpu = backend.gpu is not None
        self._gate = PackedLinear(reader(f"{prefix}_gate.weight"), None, backend) if has_gate else None
        part = backend.shard.of(intermediate_size, "shared expert's intermediate size")
        gate_up = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = load_linear(reader, gate_up, bias=False, backend=backend, gated=True, outputs=lambda name: part)
        self._down = load_linear(reader, [f"{prefix}.down_proj"], bias=False, backend=backend, inputs=part)

    @property
    def num_bytes(self) -> int:
        return self._gate_up.num_bytes + self._down.num_bytes + (0 if self._gate is None else self._gate.num_bytes)

    def add_to_(self, into: Stream, h_TE: torch.Tensor) -> None:
        """Adds this rank's part to a stream, in place; on a GPU to the stream's pending delta, which holds the chosen
        experts' result. h_TE: normed, in the compute dtype."""
        take = current().workspace.take
        hidden_TF = self._gate_up(h_TE, out=take("shared expert", len(h_TE), self._gate_up.num_outputs))
        if self._gate is not None:
            # The same as after `down`, which is linear.
            hidden_TF *= self._sigmoid(self._gate(h_TE).float())
        if isinstance(into, Residual):
            assert into.is_pending
            into.delta_TE += self._down(hidden_TF, out=take("shared expert's result", *into.delta_TE.shape))
        else:
            self._down.add_to_(into, hidden_TF)

    def _sigmoid(self, logits_T1: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(logits_T1) if self._on_gpu else sigmoid(logits_T1)
