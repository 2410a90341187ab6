"""DeepSeek-V3's layer for multi-token prediction (arXiv 2412.19437, section 2.2): a projection of the normed embedding
beside the normed hidden state, then one more layer of the model.

The checkpoint holds it behind the model's layers. One layer predicts all drafts: each pass reads the result of the one
before.
"""

import torch

from kernels.backend import Backend
from worker.layers.forward_context import TargetStates
from worker.layers.linear import load_head, load_linear
from worker.layers.norm import Norm
from worker.layers.residual import ResidualStream, norm_shapes
from worker.models.families.deepseek import DeepseekBlock
from worker.models.heads.config import HeadConfig
from worker.models.heads.head import Head, buffer_like, side_by_side
from worker.models.heads.shared import SharedParts
from worker.weights.reader import Shape, WeightReader

_NORMS = ("enorm", "hnorm", "shared_head.norm")
HEAD_OF_LAYER = "shared_head.head"


class MtpHead(Head):
    def __init__(
        self, config: HeadConfig, shared: SharedParts, reader: WeightReader, backend: Backend, *, own_output: bool
    ) -> None:
        """own_output: the checkpoint holds the output head a second time."""
        layers, prefix = config.layers, config.mtp_prefix
        norm, eps = f"{prefix}.shared_head.norm.weight", layers.rms_norm_eps
        if own_output:
            output = load_head(reader, f"{prefix}.{HEAD_OF_LAYER}.weight", backend=backend, norm=norm, eps=eps)
        else:
            output = shared.output(reader(norm).float(), eps, backend)
        super().__init__(config, shared.embedding(backend), output, backend)
        self._norm = shared.last_norm(backend)
        self._embedding_norm = Norm(f"{prefix}.enorm", eps, reader, backend)
        self._hidden_norm = Norm(f"{prefix}.hnorm", eps, reader, backend)
        self._projection = load_linear(reader, [f"{prefix}.eh_proj"], bias=False, backend=backend)
        self._block = DeepseekBlock(layers, 0, prefix, reader, backend)

    @staticmethod
    def shapes(config: HeadConfig, *, own_output: bool) -> dict[str, Shape]:
        """Returns the shapes of the layer's tensors, by name. own_output: it has a copy of the output head."""
        layers, prefix, size = config.layers, config.mtp_prefix, config.hidden_size
        shapes = norm_shapes(prefix, size, *_NORMS) | DeepseekBlock.shapes(layers, 0, prefix)
        shapes[f"{prefix}.eh_proj.weight"] = size, 2 * size
        if own_output:
            shapes[f"{prefix}.{HEAD_OF_LAYER}.weight"] = config.draft_vocab_size, size
        return shapes

    def states_of(self, target: TargetStates) -> torch.Tensor:
        # As in vLLM and SGLang the layer reads the state behind the model's last norm.
        return self._norm(target.last_TE, out=torch.empty_like(target.last_TE))

    def _compute_into_(self, x_TE: torch.Tensor, hidden_TE: torch.Tensor, embeddings: torch.Tensor) -> None:
        parts = (
            self._embedding_norm(embeddings, out=buffer_like(x_TE, "normed embeddings")),
            self._hidden_norm(hidden_TE, out=buffer_like(x_TE, "normed states")),
        )
        self._projection.add_to_(x_TE.zero_(), side_by_side("both", parts))
        self._block.forward(ResidualStream(x_TE))
