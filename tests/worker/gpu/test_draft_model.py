"""A draft model beside the GPU engine, interpreted. The model is a stand-in, as is its twin: all drafts come true."""

import dataclasses

import numpy as np
import pytest
import torch

from protos.inference_pb2 import SamplingParams
from scheduler.core.messages import CoreSettings, Speculation
from tests.fakes.fake_model import VOCAB_SIZE
from tests.fakes.fake_runner import fake_runner
from tests.fakes.gpu.fake_gpu_runner import fake_gpu_runner
from tests.fakes.gpu.gpu_model import FakeGpuModel, fake_kv_cache
from tests.support.gpu.small_llama import VOCABULARY, small_llama
from tests.support.scheduler.costs import FREE
from tests.support.scheduler.generate import Asked, Generated, generate
from worker.gpu.executor import GpuDraftExecutor, GpuExecutor
from worker.gpu.runner import GpuRunner
from worker.layers.kv_cache import KVCache
from worker.models.drafting.draft_model import DraftModel
from worker.step.batch import InputBatch

DRAFTS = Speculation(num_speculative_tokens=4, workers_draft=True)
LONG = [(7 * i) % 40 for i in range(60)]
REQUESTS = [
    Asked([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)),
    Asked(LONG, SamplingParams(temperature=1.0, top_p=0.95, seed=3, max_tokens=16, ignore_eos=True), num_choices=2),
    Asked(LONG[:40], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)),
    Asked([9] * 9, SamplingParams(temperature=1.5, seed=8, max_tokens=16, ignore_eos=True), output=[3, 4, 5]),
]


def runner_with_drafter(num_blocks: int, **sizes: int) -> GpuRunner:
    runner = fake_gpu_runner(num_blocks=num_blocks, **sizes)
    rows = runner._rows
    num_spare = DraftModel.num_spare(rows.max_num_seqs, 4, rows.block_size)
    executor = GpuDraftExecutor(
        FakeGpuModel(),
        vocab_size=VOCAB_SIZE,
        max_tokens=DraftModel.most_tokens(rows.max_num_seqs),
        max_rows=rows.max_num_seqs,
        max_context=rows.max_model_len,
    )
    kv_cache = fake_kv_cache(num_blocks=num_blocks + 1 + num_spare)
    runner._drafter = DraftModel(
        "draft_model twin", executor, kv_cache, rows, max_drafts=4, max_len=1000, vocab_size=VOCAB_SIZE
    )
    return runner


def settings(num_blocks: int, steps: int, speculation: Speculation | None = None, **changes: object) -> CoreSettings:
    plain = CoreSettings(
        block_size=8,
        num_blocks=num_blocks,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_steps_in_flight=steps,
        speculation=speculation,
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected() -> Generated:
    return generate(fake_runner(), settings(64, 1), REQUESTS)


@pytest.mark.parametrize(("num_blocks", "steps", "num_swap_blocks"), [(64, 3, 0), (14, 2, 64)])
def test_all_drafts_of_a_twin_come_true(expected: Generated, num_blocks: int, steps: int, num_swap_blocks: int) -> None:
    runner = runner_with_drafter(num_blocks, max_steps_in_flight=steps, num_swap_blocks=num_swap_blocks)
    mode = {"preemption_mode": "swap", "num_swap_blocks": num_swap_blocks} if num_swap_blocks else {}
    made = generate(runner, settings(num_blocks, steps, DRAFTS, **mode), REQUESTS, costs=FREE)
    assert made.texts == expected.texts
    assert made.stats.num_accepted_tokens > 20
    assert (made.stats.num_preemptions > 0) == (num_blocks < 64)
    assert (made.stats.num_swaps > 0) == bool(num_swap_blocks)
    for key, position, drafts in made.proposed:
        told = expected.tokens[key][position : position + len(drafts)]
        assert told == list(drafts)[: len(told)], (key, position)


def test_lost_workers_change_no_output(expected: Generated) -> None:
    made = generate(runner_with_drafter(64), settings(64, 1, DRAFTS), REQUESTS, lose_at=7, costs=FREE)
    assert made.texts == expected.texts


def test_a_pass_gives_the_tokens_of_its_logits() -> None:
    """A real model: 3 tokens of one row, the fourth of another."""
    model = small_llama(1)
    executor = GpuDraftExecutor(GpuExecutor(model), vocab_size=VOCABULARY, max_tokens=16, max_rows=2, max_context=32)
    kv_cache = KVCache(model.config, num_blocks=5, block_size=8, backend=model.backend)
    batch = InputBatch.of(
        token_ids_T=np.array([3, 4, 5]),
        positions_T=np.arange(3),
        slots_T=np.arange(8, 11),
        query_starts=np.array([0, 3], np.int32),
        context_lens_S=np.array([3], np.int32),
        block_tables_SB=np.array([[1]], np.int32),
        logit_indices=np.array([2]),
    )
    with torch.inference_mode():
        ids_L, largest_L = executor.greedy(batch, kv_cache)
        logits_LV = executor.logits(executor.wanted(batch, kv_cache))
    assert logits_LV.shape == (1, VOCABULARY)
    assert ids_L.tolist() == logits_LV.argmax(1).tolist()
    assert largest_L.tolist() == logits_LV.amax(1).tolist()
