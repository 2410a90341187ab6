"""The real runner over a model without weights."""

import torch

from kernels.backend import torch_backend
from protos import inference_pb2
from tests.fakes.fake_model import VOCAB_SIZE, FakeModel, fake_config
from worker.cpu.runner import Runner
from worker.layers.kv_cache import KVCache
from worker.sampling.grammars import Grammars
from worker.step.rows import Rows


def fake_runner(
    *,
    num_blocks: int = 64,
    block_size: int = 8,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    num_swap_blocks: int = 0,
    grammars: Grammars | None = None,
) -> Runner:
    config = fake_config()
    rows = Rows(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=config.eos_token_ids,
        grammars=grammars,
    )
    info = inference_pb2.ModelInfo(
        name="fake", max_model_len=max_model_len, vocab_size=VOCAB_SIZE, block_size=block_size, num_blocks=num_blocks
    )
    cache = KVCache(config, num_blocks=num_blocks + 1, block_size=block_size, backend=torch_backend(torch.float32))
    return Runner(FakeModel(), cache, rows, info, num_swap_blocks=num_swap_blocks)
