"""The model of tests.fakes.fake_model for worker.gpu.engine: its logits are the same hash of the tokens that attention
sees, through the batch, the tables of permanent rows and the slots that the engine made on the device."""

import torch

from kernels.backend import Backend, gpu_backend
from kernels.linear.residual import Residual
from tests.fakes.fake_model import context_hash, fake_config, hidden_logits
from tests.support.gpu.gpu import DEVICE
from worker.gpu.executor import GpuExecutor, PiecewiseGraph
from worker.layers.kv_cache import KVCache
from worker.parallel.groups import Groups
from worker.step.batch import GpuBatch

PATH = gpu_backend(torch.float32, torch.device(DEVICE))


def fake_kv_cache(*, num_blocks: int = 64, block_size: int = 8) -> KVCache:
    return KVCache(fake_config(), num_blocks=num_blocks, block_size=block_size, backend=PATH)


class FakeGpuModel(GpuExecutor):
    """Its hidden states: [hash of the context up to the token, 1 if that context holds POISON]; zeros for padding."""

    backend: Backend = PATH
    groups = Groups()

    def __init__(self) -> None:
        self.reserved: tuple[int, int, int] | None = None
        # (tokens, rows) of each forward pass, padding included.
        self.shapes: list[tuple[int, int]] = []

    def reserve(self, *, max_tokens: int, max_rows: int, max_context: int, most_queries: int = 1) -> None:
        assert self.reserved is None
        self.reserved = max_tokens, max_rows, max_context

    def forward(self, batch: GpuBatch, kv_cache: KVCache, pieces: PiecewiseGraph | None = None) -> Residual:
        self.shapes.append((batch.num_tokens, batch.num_rows))
        cache_NB2 = kv_cache.layers[0][:, 0, 0]
        block_size = kv_cache.block_size
        starts, contexts = batch.query_starts.tolist(), batch.context_lens_S.tolist()
        self._check_padding(batch, starts)
        written = batch.slots_T >= 0
        slots = batch.slots_T[written]
        assert len(slots.unique()) == len(slots), "two tokens in one slot"
        tokens_and_positions = torch.stack((batch.token_ids_T, batch.positions_T), -1)[written].float()
        cache_NB2[slots // block_size, slots % block_size] = tokens_and_positions
        hidden = torch.zeros(batch.num_tokens, 2, dtype=torch.float64)
        for i, row in enumerate(batch.rows_S.tolist()):
            positions = torch.arange(contexts[i], device=DEVICE)
            blocks = batch.block_tables_RB[row, positions // block_size].long()
            context = cache_NB2[blocks, positions % block_size]
            assert context[:, 1].tolist() == positions.tolist(), "the cache does not hold the context"
            num_queries = starts[i + 1] - starts[i]
            assert num_queries <= batch.max_query_len
            for query in range(num_queries):
                length = contexts[i] - num_queries + query + 1
                hidden[starts[i] + query] = torch.tensor(context_hash(context[:length, 0].long().tolist()))
        hidden = hidden.to(DEVICE)
        return Residual(hidden, hidden)

    def logits(self, hidden_SE: Residual, out: torch.Tensor | None = None) -> torch.Tensor:
        logits_SV = hidden_logits(hidden_SE.x_TE.cpu())
        return logits_SV if out is None else out.copy_(logits_SV)

    def write_part_of_logits(self, hidden_SE: Residual, out_SP: torch.Tensor) -> None:
        raise AssertionError("the vocabulary is not divided")

    def gather_logits(self, part_SP: torch.Tensor, out_SV: torch.Tensor) -> None:
        raise AssertionError("the vocabulary is not divided")

    def likeliest(self, part_SP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("the vocabulary is not divided")

    @staticmethod
    def _check_padding(batch: GpuBatch, starts: list[int]) -> None:
        for i, row in enumerate(batch.rows_S.tolist()):
            assert row >= 0 or (starts[i] == starts[i + 1] and batch.context_lens_S[i] == 0)
        for tensor, value in ((batch.token_ids_T, -1), (batch.positions_T, 0), (batch.slots_T, -1)):
            assert (tensor[starts[-1] :] == value).all(), "wrong padding"
