"""The division of a GPU's memory, and errors when it is too small, which name numbers that work."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from configs.load import load_options
from configs.options import Options
from protos import inference_pb2
from worker.device.device import DeviceMemory, InterpretedDevice
from worker.errors import PermanentError
from worker.gpu.components import worst_step
from worker.gpu.memory import (
    MemoryUse,
    account,
    cache_needs_more,
    graphs_need_more,
    is_out_of_memory,
    measure_use,
    num_kv_blocks,
    out_of_memory,
    scaled_down,
    serving_needs_more,
    step_needs_more,
    weights_need_more,
)

GIB = 2**30
BLOCK = 2 * 2**20


def options_of(**changes: Any) -> Options:
    return load_options(flags=changes, environ={})


def use_of(*, total: float = 80, others: float = 1, weights: float = 15, step: float = 2, graphs: float = 0.5):
    return MemoryUse(
        total=int(total * GIB),
        others=int(others * GIB),
        weights=int(weights * GIB),
        step=int(step * GIB),
        graphs=int(graphs * GIB),
    )


class TestBlocks:
    def test_they_get_what_the_share_leaves_but_for_the_null_block(self):
        # This worker may use 72 GiB, of which 18.5 are taken.
        assert num_kv_blocks(use_of(), options_of(), BLOCK) == 53.5 * GIB // BLOCK - 1

    def test_what_others_hold_comes_off_the_share(self):
        """Otherwise two workers on one GPU would both plan with the same memory."""
        alone, beside = (num_kv_blocks(use_of(others=others), options_of(), BLOCK) for others in (1, 31))
        assert alone - beside == 30 * GIB // BLOCK

    def test_what_nccl_will_take_is_left_to_it(self):
        alone, of_several = use_of(), replace(use_of(), nccl=GIB)
        blocks, fewer = (num_kv_blocks(use, options_of(), BLOCK) for use in (alone, of_several))
        assert blocks - fewer == GIB // BLOCK
        info = inference_pb2.ModelInfo(num_blocks=fewer, block_size=16, max_model_len=8192)
        assert ", NCCL 1.00, the driver and other processes" in account(of_several, options_of(), info, BLOCK)
        with pytest.raises(PermanentError, match=r"CUDA graphs 0\.50, NCCL 1\.00, the driver"):
            num_kv_blocks(replace(use_of(weights=70), nccl=GIB), options_of(), BLOCK)

    def test_an_override_is_kept_whatever_there_is(self):
        assert num_kv_blocks(use_of(weights=100), options_of(num_blocks_override=7), BLOCK) == 7

    def test_the_ways_out_are_numbers_that_work(self):
        use, options = use_of(weights=70, step=3, graphs=1), options_of()
        with pytest.raises(PermanentError) as error:
            num_kv_blocks(use, options, BLOCK)
        said = str(error.value)
        assert "gives this worker 72.00 of the GPU's 80.00 GiB, which leaves 0.00 GiB for the KV cache: " in said
        assert "weights take 70.00, a step 3.00, CUDA graphs 1.00, the driver and other processes 1.00" in said
        # 3.5 GiB are lacking; the step's 3 or the graphs' 1 would not make up for them.
        assert said.endswith("; use gpu_memory_utilization=0.95 or above, or quantization=fp8")
        assert num_kv_blocks(use, options_of(gpu_memory_utilization=0.95), BLOCK) * 16 >= 4096

    def test_fewer_tokens_are_named_if_they_make_the_room(self):
        use = use_of(weights=60, step=12, graphs=1)
        with pytest.raises(PermanentError, match="max_num_batched_tokens=6464, or quantization=fp8"):
            num_kv_blocks(use, options_of(max_num_batched_tokens=8192), BLOCK)
        fewer = use_of(weights=60, step=12 * 6464 / 8192, graphs=1)
        assert num_kv_blocks(fewer, options_of(), BLOCK) * 16 >= 4096

    def test_a_length_that_does_not_fit_is_told_what_does(self):
        use, options = use_of(weights=68), options_of(max_model_len=8192)
        with pytest.raises(PermanentError) as error:
            num_kv_blocks(use, options, BLOCK)
        said = str(error.value)
        assert "leaves 0.50 GiB for the KV cache, and max_model_len=8192 needs 1.00: " in said
        assert "gpu_memory_utilization=0.91 or above, or max_model_len=4080 or less, or max_num_batched_tokens=" in said
        assert num_kv_blocks(use, options_of(max_model_len=4080), BLOCK) == 255
        assert num_kv_blocks(use, options_of(max_model_len=8192, gpu_memory_utilization=0.91), BLOCK) >= 512

    def test_a_model_that_is_too_large_is_said_to_be(self):
        with pytest.raises(PermanentError, match="; this model needs a GPU with more memory"):
            num_kv_blocks(use_of(weights=79, step=0.5), options_of(quantization="fp8"), BLOCK)


def test_scaled_numbers_are_round_and_never_none():
    assert scaled_down(2048, 1.0, 2.1) == 960
    assert scaled_down(100, 1.0, 2.0) == 50
    assert scaled_down(4, 1.0, 100.0) == 1


def test_the_log_accounts_for_every_gib():
    use = use_of()
    num_blocks = num_kv_blocks(use, options_of(), BLOCK)
    info = inference_pb2.ModelInfo(num_blocks=num_blocks, block_size=16, max_model_len=8192)
    said = account(use, options_of(), info, BLOCK)
    assert said == (
        "GPU memory: 80.00 GiB, of which gpu_memory_utilization=0.9 gives 72.00: weights 15.00, a step's peak 2.00, "
        "CUDA graphs 0.50, the driver and other processes 1.00, KV cache 53.50 (27391 blocks, 438256 tokens: 53.5 "
        "sequences of max_model_len=8192 at once)"
    )


class MeasuredDevice(InterpretedDevice):
    """A device whose memory readings are given, one after the other."""

    def __init__(self, *answers: DeviceMemory, peak: int) -> None:
        super().__init__()
        self._answers, self._peak = iter(answers), peak

    def memory(self) -> DeviceMemory:
        return next(self._answers)

    def peak_bytes(self, body: Callable[[], None]) -> int:
        body()
        return self._peak


def test_what_is_measured_is_told_apart():
    """Memory that kernels and libraries took during the step lowers free memory but does not show in torch's allocator.
    Memory of an earlier, smaller step counts to the step, not to the weights."""
    device = MeasuredDevice(
        DeviceMemory(total=100, free=60, allocated=32, reserved=35),
        DeviceMemory(total=100, free=48, allocated=33, reserved=40),
        peak=11,
    )
    ran: list[str] = []
    use = measure_use(device, lambda: ran.append("step"), weights=30, kv_bytes=2)
    assert use == MemoryUse(total=100, others=12, weights=30, step=11)
    assert use.taken + use.left(0.9) == 90


class TestWorstStep:
    def test_it_has_all_tokens_in_all_rows(self):
        inputs = worst_step(max_num_seqs=3, max_num_batched_tokens=20, max_model_len=64, block_size=4, vocab_size=50)
        assert inputs.query_starts.tolist() == [0, 7, 14, 20]
        assert inputs.context_lens_S.tolist() == [7, 7, 6]
        assert inputs.sampling_N.tolist() == inputs.rows_S.tolist() == [0, 1, 2]
        changes = inputs.table_changes
        assert changes is not None
        assert list(zip(changes.rows_C.tolist(), changes.places_C.tolist(), strict=True)) == [
            (0, 0),
            (0, 1),
            (1, 0),
            (1, 1),
            (2, 0),
            (2, 1),
        ]
        assert set(changes.block_ids_C.tolist()) == {1}, "the only block there is"
        assert inputs.prompt_scores is not None
        # What follows a row's last token is sampled, so it needs no score.
        assert inputs.prompt_scores.tokens_P.tolist() == [*range(6), *range(7, 13), *range(14, 19)]

    def test_no_row_is_longer_than_a_sequence_may_be(self):
        inputs = worst_step(max_num_seqs=2, max_num_batched_tokens=2048, max_model_len=64, block_size=16, vocab_size=50)
        assert np.diff(inputs.query_starts).tolist() == [64, 64]

    def test_more_rows_than_tokens_are_not_filled(self):
        inputs = worst_step(max_num_seqs=256, max_num_batched_tokens=8, max_model_len=64, block_size=16, vocab_size=5)
        assert inputs.rows_S.tolist() == [*range(8)]
        assert inputs.prompt_scores is None
        assert all(row.top_k <= 5 and (row.num_logprobs or 0) <= 5 for row in inputs.new_rows)


class TestOutOfMemory:
    def test_which_errors_are(self):
        assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
        assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
        assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"))
        assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
        assert not is_out_of_memory(ValueError("out of memory"))

    def test_the_end_of_a_capture_that_fails_for_it_is_one(self):
        ended = RuntimeError("CUDA error: operation failed due to a previous error during capture")
        ended.__context__ = torch.OutOfMemoryError("CUDA out of memory")
        assert is_out_of_memory(ended)

    def test_what_was_half_made_is_gone_when_memory_is_looked_at(self):
        """Otherwise, if a KV cache does not fit, the error would count its layers that did fit as memory in use."""
        alive: list[str] = []

        class Layer:
            def __del__(self) -> None:
                alive.clear()

        def half_made() -> None:
            layers = [Layer()]
            alive.append("layer")
            raise torch.OutOfMemoryError(f"CUDA out of memory, with {len(layers)} layers made")

        def half_captured() -> None:
            try:
                half_made()
            finally:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

        seen: list[int] = []

        def become() -> PermanentError:
            seen.append(len(alive))
            return PermanentError("use less")

        with pytest.raises(PermanentError, match="use less") as error, out_of_memory(become):
            half_made()
        assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
        with pytest.raises(PermanentError, match="use less"), out_of_memory(become):
            half_captured()
        assert seen == [0, 0]

    def test_other_errors_stay_what_they_are(self):
        with pytest.raises(RuntimeError, match="device-side assert"), out_of_memory(lambda: PermanentError("no")):
            raise RuntimeError("device-side assert")

    def test_weights(self):
        memory = DeviceMemory(total=24 * GIB, free=23 * GIB)
        said = str(weights_need_more(options_of(), memory, needed=30 * GIB, as_fp8=16 * GIB))
        assert "they need 30.00 GiB, and 23.00 of 24.00 GiB are free" in said
        assert "use quantization=fp8, which needs 16.00, or a GPU with more than 33.33 GiB" in said
        beyond = weights_need_more(options_of(), memory, needed=60 * GIB, as_fp8=30 * GIB)
        assert "fp8" not in str(beyond), "it would not fit either"
        crowded = DeviceMemory(total=80 * GIB, free=20 * GIB)
        said = str(weights_need_more(options_of(), crowded, needed=30 * GIB, as_fp8=16 * GIB))
        assert "end what else runs on this GPU, which holds 60.00" in said

    def test_a_step(self):
        memory = DeviceMemory(total=80 * GIB, free=5 * GIB)
        options = options_of(max_num_batched_tokens=65536)
        said = str(step_needs_more(options, memory, part=8, needed_by_part=1 * GIB))
        assert "1/8 of both took 1.00 GiB, and beside the weights 5.00 of 80.00 GiB are free" in said
        assert "use max_num_batched_tokens=32768, and max_num_seqs=128 if that is not enough" in said

    def test_a_kv_cache(self):
        memory, use = DeviceMemory(total=80 * GIB, free=40 * GIB), use_of(step=2, graphs=1)
        blocks = {"num_blocks": 52 * GIB // BLOCK, "block_bytes": BLOCK, "free_before": 60 * GIB}
        error = cache_needs_more(options_of(), memory, use, **blocks)
        assert "52.00 GiB, and 40.00 of 80.00 are free (20.00 less than a moment ago)" in str(error)
        # 12 GiB are lacking for the cache, and 3 for step and graphs.
        assert "gpu_memory_utilization=0.71 instead of 0.9" in str(error)
        error = cache_needs_more(options_of(num_blocks_override=26_623), memory, use, **blocks)
        assert f"use {37 * GIB // BLOCK - 1} or less" in str(error)

    def test_graphs(self):
        memory = DeviceMemory(total=80 * GIB, free=GIB)
        error = graphs_need_more(options_of(), memory, (1, 2, 4, 8, 16))
        assert '"cudagraph_capture_sizes": [1, 2, 4, 8]}' in str(error)
        assert "gpu_memory_utilization=0.88, or enforce_eager=true" in str(error)
        assert "cudagraph_capture_sizes" not in str(graphs_need_more(options_of(), memory, (1,)))

    def test_a_step_of_requests(self):
        memory = DeviceMemory(total=80 * GIB, free=0, allocated=66 * GIB, reserved=68 * GIB)
        error = serving_needs_more(options_of(), memory, use_of(others=4))
        assert "the driver and other processes 12.00 (4.00 when memory was measured)" in str(error)
        assert "gpu_memory_utilization=0.80 instead of 0.9" in str(error)
        unexplained = serving_needs_more(options_of(), memory, use_of(others=12))
        assert "gpu_memory_utilization=0.89 instead" in str(unexplained)
