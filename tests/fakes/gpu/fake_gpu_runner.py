"""The real GPU runner and engine over fake_runner's model, with Triton's interpreter instead of a GPU."""

from protos import inference_pb2
from tests.fakes.fake_model import VOCAB_SIZE, fake_config
from tests.fakes.gpu.gpu_model import FakeGpuModel, fake_kv_cache
from tests.support.gpu.gpu import gpu_device
from worker.gpu.engine import GpuEngine
from worker.gpu.runner import GpuRunner
from worker.gpu.swap import GpuSwapSpace
from worker.step.rows import Rows


def fake_gpu_runner(
    *,
    num_blocks: int = 64,
    block_size: int = 8,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    num_swap_blocks: int = 0,
    max_steps_in_flight: int = 1,
) -> GpuRunner:
    """A GpuRunner; arguments as for fake_runner."""
    rows = Rows(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=fake_config().eos_token_ids,
    )
    info = inference_pb2.ModelInfo(
        name="fake", max_model_len=max_model_len, vocab_size=VOCAB_SIZE, block_size=block_size, num_blocks=num_blocks
    )
    device, kv_cache = gpu_device(), fake_kv_cache(num_blocks=num_blocks + 1, block_size=block_size)
    engine = GpuEngine(
        FakeGpuModel(),
        kv_cache,
        device,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        max_steps_in_flight=max_steps_in_flight,
    )
    swap_space = GpuSwapSpace(kv_cache, device, num_swap_blocks)
    return GpuRunner(engine, rows, info, swap_space=swap_space, max_steps_in_flight=max_steps_in_flight)
