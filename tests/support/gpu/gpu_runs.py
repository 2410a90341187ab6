"""Steps of a model on a GPU path, with or without a GPU (tests.support.gpu.gpu.DEVICE)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kernels.backend import Backend
from tests.support.gpu.gpu import DEVICE
from worker.gpu.executor import GpuExecutor
from worker.layers.kv_cache import KVCache
from worker.models.decoder import Model
from worker.parallel.groups import Groups
from worker.step.batch import GpuBatch


class DictReader:
    """A WeightReader over a state dict."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._tensors = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
        self._dtype = dtype

    def __call__(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self._dtype)

    def weight(self, name: str, outputs: slice | None = None, inputs: slice | None = None) -> torch.Tensor:
        return self(name)[outputs or slice(None), inputs or slice(None)].contiguous()

    def head_weight(self, name: str, outputs: slice | None = None) -> torch.Tensor:
        return self.weight(name, outputs)

    def float32(self, name: str) -> torch.Tensor:
        return self._tensors[name].float()

    def packed(self, names: Sequence[str]) -> None:
        return None

    def keep(self, names: Sequence[str], packed: object) -> None:
        raise AssertionError("nothing is packed on a GPU")

    def kv_scale(self, attention: str) -> None:
        return None


@dataclass
class GpuModelRun:
    """Sequences in permanent rows, over blocks that are given out in random order."""

    model: Model
    backend: Backend
    block_size: int = 16
    num_blocks: int = 64
    max_rows: int = 8
    max_context: int = 256
    groups: Groups = field(default_factory=Groups)
    executor: GpuExecutor = field(init=False)
    kv_cache: KVCache = field(init=False)
    tables_RB: torch.Tensor = field(init=False)
    # Tokens of each row whose KV exists.
    num_computed: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.executor = GpuExecutor(self.model, self.groups)
        self.kv_cache = KVCache(
            self.model.config, num_blocks=self.num_blocks, block_size=self.block_size, backend=self.backend
        )
        # Slots that no token was written to must not be read.
        for layer in self.kv_cache.layers:
            layer.copy_(torch.full_like(layer, float("nan")))
        width = self.max_context // self.block_size
        free = torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(3))[: self.max_rows * width]
        assert len(free) == self.max_rows * width, "too few blocks"
        self.tables_RB = (free + 1).view(self.max_rows, width).int().to(self.backend.device)
        self.num_computed = [0] * self.max_rows
        self.executor.reserve(max_tokens=self.max_context, max_rows=self.max_rows, max_context=self.max_context)

    def batch(
        self, tokens_of: Mapping[int, Sequence[int]], *, padded_rows: int = 0, padded_tokens: int = 0
    ) -> GpuBatch:
        """A batch of the next tokens of some rows, followed by padding."""
        token_ids, positions, slots, starts, contexts = [], [], [], [0], []
        for row, tokens in tokens_of.items():
            first = self.num_computed[row]
            for position, token in enumerate(tokens, first):
                block = int(self.tables_RB[row, position // self.block_size])
                token_ids.append(token)
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
            self.num_computed[row] = first + len(tokens)
            starts.append(len(token_ids))
            contexts.append(self.num_computed[row])
        pad = padded_tokens
        starts += [starts[-1]] * padded_rows

        def on_device(numbers: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(numbers, dtype=dtype, device=self.backend.device)

        return GpuBatch(
            token_ids_T=on_device(token_ids + [-1] * pad),
            positions_T=on_device(positions + [0] * pad),
            slots_T=on_device(slots + [-1] * pad, torch.int64),
            rows_S=on_device([*tokens_of, *[-1] * padded_rows]),
            query_starts=on_device(starts),
            context_lens_S=on_device(contexts + [0] * padded_rows),
            block_tables_RB=self.tables_RB,
            max_query_len=max(map(len, tokens_of.values())),
        )

    def step(self, tokens_of: Mapping[int, Sequence[int]], **padding: int) -> torch.Tensor:
        """Computes the logits of all the step's tokens, [T, V] on the CPU."""
        batch = self.batch(tokens_of, **padding)
        hidden = self.executor.forward(batch, self.kv_cache)
        with torch.inference_mode():
            return self.executor.logits(hidden)[: sum(map(len, tokens_of.values()))].cpu()
