"""Swap: a sequence whose blocks went to host memory and came back into other blocks goes on unchanged."""

import pytest
import torch

from configs.options import Options
from protos import step_pb2
from protos.inference_pb2 import SamplingParams
from tests.fakes.fake_model import fake_config
from tests.fakes.fake_runner import fake_runner
from tests.support.scheduler.steps import decodes, said
from worker.cpu.runner import Runner
from worker.errors import PermanentError, PlanError
from worker.models.info import resolve_num_swap_blocks

SAMPLING = SamplingParams(temperature=1.0, seed=3, presence_penalty=1.0)
PROMPT = list(range(20, 37))


def new_row(row: int, sequence: int, tokens: list[int], blocks: list[int], num_computed_tokens: int = 0):
    return step_pb2.NewRow(
        row=row,
        sequence=sequence,
        token_ids=tokens,
        num_prompt_tokens=len(PROMPT),
        block_ids=blocks,
        num_computed_tokens=num_computed_tokens,
        sampling=SAMPLING,
    )


def say(runner: Runner, **fields) -> list[int]:
    return said(runner.execute(step_pb2.StepPlan(**fields))).token_ids


def test_a_swapped_sequence_says_the_same():
    alone = fake_runner()
    expected = say(alone, new_rows=[new_row(0, 1, PROMPT, [1, 2, 3])], rows=[0], num_tokens=[17])
    for _ in range(5):
        expected += say(alone, decode_rows=decodes(0))

    runner = fake_runner(num_swap_blocks=4)
    assert runner.num_swap_blocks == 4
    tokens = say(runner, new_rows=[new_row(0, 1, PROMPT, [1, 2, 3])], rows=[0], num_tokens=[17])
    tokens += say(runner, decode_rows=decodes(0))
    # It is swapped out; in the same step another sequence takes its row and blocks.
    other = step_pb2.NewRow(
        row=0, sequence=2, token_ids=[9] * 17, num_prompt_tokens=17, block_ids=[3, 1, 2], sampling=SAMPLING
    )
    swap = {"swap_out_blocks": [1, 2, 3], "swap_out_host_blocks": [3, 0, 2]}
    say(runner, freed_rows=[0], new_rows=[other], rows=[0], num_tokens=[17], **swap)
    # It comes back in another row and other blocks, with all tokens computed but the last.
    back = new_row(5, 3, PROMPT + tokens, [9, 8, 1], num_computed_tokens=18)
    swap = {"swap_in_host_blocks": [3, 0, 2], "swap_in_blocks": [9, 8, 1]}
    tokens += say(runner, freed_rows=[0], new_rows=[back], decode_rows=decodes(5), **swap)
    for _ in range(3):
        tokens += say(runner, decode_rows=decodes(5))
    assert tokens == expected


def test_out_comes_before_in():
    # Blocks go out and, in the same step, come back into each other's places from the same host blocks.
    runner = fake_runner(num_swap_blocks=2)
    cache = runner._kv_cache.layers[0]
    cache[1], cache[2] = 1.0, 2.0
    new = new_row(0, 1, PROMPT[:3], [9])
    new.num_prompt_tokens = 3
    swap = {"swap_out_blocks": [1, 2], "swap_out_host_blocks": [0, 1], "swap_in_host_blocks": [0, 1]}
    say(runner, new_rows=[new], rows=[0], num_tokens=[3], swap_in_blocks=[2, 1], **swap)
    assert torch.equal(cache[1], torch.full_like(cache[1], 2.0))
    assert torch.equal(cache[2], torch.full_like(cache[2], 1.0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"swap_out_blocks": [65], "swap_out_host_blocks": [0]}, "swap_out_blocks: 65; there are blocks 1 to 64"),
        ({"swap_out_blocks": [0], "swap_out_host_blocks": [0]}, "swap_out_blocks: 0; there are"),
        ({"swap_out_blocks": [1], "swap_out_host_blocks": [2]}, "swap_out_host_blocks: 2; there are blocks 0 to 1"),
        ({"swap_in_blocks": [65], "swap_in_host_blocks": [0]}, "swap_in_blocks: 65"),
        ({"swap_in_blocks": [1], "swap_in_host_blocks": [9]}, "swap_in_host_blocks: 9"),
        ({"swap_out_blocks": [1, 2], "swap_out_host_blocks": [0]}, "swap_out_host_blocks: 1 entries for 2 blocks"),
        ({"swap_in_blocks": [1], "swap_in_host_blocks": []}, "swap_in_blocks: 1 entries for 0 blocks"),
        ({"swap_in_blocks": [3, 3], "swap_in_host_blocks": [0, 1]}, "swap_in_blocks: a block is named twice"),
    ],
)
def test_swaps_that_cannot_be_are_refused_with_field_and_value(fields: dict, message: str):
    runner = fake_runner(num_swap_blocks=2)
    with pytest.raises(PlanError, match=message):
        say(runner, new_rows=[new_row(0, 1, PROMPT, [1, 2, 3])], rows=[0], num_tokens=[17], **fields)


def test_swap_space_is_counted_in_blocks_and_only_if_asked_for():
    config = fake_config()
    # One block of 8 tokens: 8 * 2 * 2 * 4 bytes.
    swap = Options(block_size=8, preemption_mode="swap", swap_space=1 / 1024)
    assert resolve_num_swap_blocks(swap, config, torch.float32) == 2**20 // 128
    assert resolve_num_swap_blocks(Options(block_size=8), config, torch.float32) == 0
    with pytest.raises(PermanentError, match="swap_space=0 GiB holds no KV block"):
        resolve_num_swap_blocks(swap.model_copy(update={"swap_space": 0.0}), config, torch.float32)
