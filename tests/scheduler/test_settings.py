"""The core's settings, made from options and from the workers' Ready."""

import logging

import pytest

from configs.options import Options
from protos import inference_pb2
from scheduler.settings import core_settings

MODEL = inference_pb2.ModelInfo(block_size=16, num_blocks=500, max_model_len=4000, eos_token_ids=[2, 7])


def test_options_and_ready_become_settings():
    options = Options(
        max_num_seqs=5,
        max_num_batched_tokens=5000,
        scheduling_policy="deadline",
        preemption_mode="swap",
        max_steps_in_flight=3,
        enable_chunked_prefill=False,
        max_queued_requests=9,
    )
    settings = core_settings(options, MODEL, 40)
    assert (settings.block_size, settings.num_blocks, settings.max_model_len) == (16, 500, 4000)
    assert (settings.preemption_mode, settings.num_swap_blocks, settings.max_steps_in_flight) == ("swap", 40, 3)
    assert (settings.scheduling_policy, settings.enable_chunked_prefill) == ("deadline", False)
    assert (settings.eos_token_ids, settings.max_num_seqs, settings.max_queued_requests) == ({2, 7}, 5, 9)


def test_milliseconds_become_seconds():
    assert core_settings(Options(inter_token_latency_target=250), MODEL).inter_token_latency_target == 0.25
    assert core_settings(Options(), MODEL).inter_token_latency_target == 0


def test_stages_have_a_step_each_and_one_is_on_its_way():
    settings = core_settings(Options(pipeline_parallel_size=3), MODEL)
    assert (settings.num_stages, settings.max_steps_in_flight) == (3, 4)


@pytest.mark.parametrize(
    ("options", "threshold"),
    [
        ({}, 0),
        ({"max_num_partial_prefills": 2}, 160),
        ({"max_num_partial_prefills": 2, "long_prefill_token_threshold": 99}, 99),
        ({"long_prefill_token_threshold": 99}, 99),
    ],
)
def test_what_counts_as_long_is_4_percent_where_prefills_share_a_step(options: dict, threshold: int):
    assert core_settings(Options(**options), MODEL).long_prefill_token_threshold == threshold


def test_prompts_that_whole_prefills_cannot_take_are_told_of_at_start(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "octavo.scheduler")
    core_settings(Options(enable_chunked_prefill=False, max_num_batched_tokens=4000), MODEL)
    core_settings(Options(max_num_batched_tokens=512), MODEL)
    assert not caplog.messages
    core_settings(Options(enable_chunked_prefill=False, max_num_batched_tokens=512), MODEL)
    [warning] = caplog.messages
    assert "max_num_batched_tokens=512 is below max_model_len=4000: prompts of more than 512 tokens are" in warning


def test_layers_that_carry_a_state_get_no_drafts(caplog: pytest.LogCaptureFixture):
    model = inference_pb2.ModelInfo()
    model.CopyFrom(MODEL)
    model.carries_states = True
    settings = core_settings(Options(), model)
    assert (settings.carries_states, settings.max_forced_tokens, settings.speculation) == (True, 0, None)
    assert not caplog.messages
    settings = core_settings(Options(speculative_config={"method": "ngram"}), model)  # type: ignore[arg-type]
    assert settings.speculation is None
    assert "speculative_config has no effect: the layers of" in caplog.text


def test_swap_without_host_blocks_is_told_of(caplog: pytest.LogCaptureFixture):
    core_settings(Options(preemption_mode="swap"), MODEL, 1)
    assert not caplog.messages
    core_settings(Options(preemption_mode="swap"), MODEL, 0)
    assert "preemption_mode=swap, but the workers have no host blocks" in caplog.text
