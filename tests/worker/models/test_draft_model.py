"""A draft model in the worker, on a tiny model: outputs are those without it, and what it proposes comes.

A draft model with the model's own weights and dtype computes the same logits bit for bit, because a token's logits do
not depend on the batch. So each of its drafts must come true: one that does not shows KV that is stale or misplaced.
"""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from configs.options import Options
from protos.inference_pb2 import SamplingParams
from scheduler.settings import core_settings
from tests.support.models.tiny_model import VOCAB_SIZE, make_tiny_model
from tests.support.scheduler.costs import FREE
from tests.support.scheduler.generate import Asked, Generated, generate
from worker.cpu.build import build_cpu_runner
from worker.errors import PermanentError
from worker.models.config import config_from_directory
from worker.models.drafting import draft_model
from worker.models.registry import model_class

LONG = [(7 * i) % 97 for i in range(60)]
REQUESTS = [
    Asked([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)),
    Asked(LONG, SamplingParams(temperature=1.0, top_p=0.95, seed=3, max_tokens=50, ignore_eos=True), num_choices=3),
    Asked(LONG[:40], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)),
    Asked([50] * 9, SamplingParams(temperature=1.5, seed=8, max_tokens=40, ignore_eos=True), output=[3, 4, 5]),
]
PENALIZED = [
    Asked([9, 8], SamplingParams(temperature=0.9, seed=8, repetition_penalty=1.3, max_tokens=30, ignore_eos=True)),
    Asked([3] * 5, SamplingParams(temperature=0.0, logprobs=1, frequency_penalty=1.0, max_tokens=30, ignore_eos=True)),
]


def make_model(directory: Path, **changes: object) -> Path:
    """Random weights, large enough that every token of the context matters."""
    make_tiny_model(directory, **changes)
    config = config_from_directory(directory)
    tensors = {}
    for name, shape in model_class("LlamaForCausalLM").tensor_shapes(config).items():
        generator = torch.Generator().manual_seed(len(tensors))
        rows = torch.randn((256, *shape[1:]), generator=generator)[: shape[0]]
        tensors[name] = torch.ones(shape) if "norm" in name else rows * 0.3
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "target")


def run(model: Path, requests: list[Asked] = REQUESTS, lose_at: int = 0, **changes: object) -> Generated:
    fields: dict[str, object] = {
        "model": str(model),
        "dtype": "float32",
        "block_size": 8,
        "num_blocks_override": 120,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "worker_threads": 1,
        "max_model_len": 128,
    }
    options = Options(**(fields | changes))  # type: ignore[arg-type]
    runner = build_cpu_runner(options)
    settings = core_settings(
        options, runner.model_info, runner.num_swap_blocks, holds_constrained=False, drafter=runner.drafter
    )
    return generate(runner, settings, requests, lose_at=lose_at, costs=FREE)


def drafts_of(model: Path | str, **changes: object) -> dict[str, object]:
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": 4, **changes}


@pytest.fixture(scope="module")
def twin(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's files at another place."""
    return Path(shutil.copytree(model, tmp_path_factory.mktemp("twin") / "draft"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Generated:
    return run(model)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_steps_in_flight": 2},
        {"num_blocks_override": 22},
        {"num_blocks_override": 22, "preemption_mode": "swap", "swap_space": 0.01},
        {"num_blocks_override": 22, "max_steps_in_flight": 2},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"lose_at": 9},
    ],
    ids=str,
)
def test_all_drafts_of_a_twin_come_true(model: Path, twin: Path, expected: Generated, changes: dict) -> None:
    """Also where blocks are shared, taken away, swapped, or lost with the workers."""
    made = run(model, speculative_config=drafts_of(twin), **changes)
    assert made.texts == expected.texts
    assert made.stats.num_accepted_tokens > 100
    assert (made.stats.num_preemptions > 0) == ("num_blocks_override" in changes)
    for key, position, drafts in made.proposed:
        told = expected.tokens[key][position : position + len(drafts)]
        assert told == list(drafts)[: len(told)], (key, position)


@pytest.mark.parametrize("changes", [{}, {"max_steps_in_flight": 2}, {"num_blocks_override": 22}], ids=str)
def test_rejected_drafts_leave_no_trace(
    model: Path, twin: Path, expected: Generated, changes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some drafts of a twin are made wrong: those before come true, also behind wrong ones of steps before."""
    choose = draft_model.DraftModel._choose

    def is_wrong(position: int) -> bool:
        return position % 7 == 3

    def poisoned(self: draft_model.DraftModel, going: list) -> list:
        left = choose(self, going)
        for each in going:
            if each.drafts and is_wrong(each.end + len(each.drafts) - 1):
                each.drafts[-1] = (each.drafts[-1] + 1) % VOCAB_SIZE
        return left

    monkeypatch.setattr(draft_model.DraftModel, "_choose", poisoned)
    made = run(model, speculative_config=drafts_of(twin), **changes)
    assert made.texts == expected.texts
    assert made.stats.num_accepted_tokens < made.stats.num_draft_tokens
    for key, position, drafts in made.proposed:
        request = REQUESTS[key[0] - 1]
        first = len(request.prompt) + len(request.output) + position
        for i, (token, draft) in enumerate(zip(expected.tokens[key][position:], drafts, strict=False)):
            assert (token != draft) == is_wrong(first + i), (key, position, i)
            if token != draft:
                break


def test_a_long_prompt_is_caught_up_with_in_several_steps(
    model: Path, twin: Path, expected: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "MOST_CATCH_UP", 10)
    made = run(model, speculative_config=drafts_of(twin))
    assert made.texts == expected.texts
    # The core first asks after two tokens: the prompt of 3 tokens is there then, those of 60 are not.
    first = {key: position for key, position, _ in reversed(made.proposed)}
    assert first[1, 0] == 2
    assert first[2, 0] > 4
    for key, position, drafts in made.proposed:
        told = expected.tokens[key][position : position + len(drafts)]
        assert told == list(drafts)[: len(told)], (key, position)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_model_drafts_for_itself_in_fewer_bits(model: Path, steps: int) -> None:
    requests = [*REQUESTS, *PENALIZED]
    plain = run(model, requests)
    made = run(
        model,
        requests,
        max_steps_in_flight=steps,
        speculative_config={"model": "same", "quantization": "int8", "method": "draft_model"},
    )
    assert made.texts == plain.texts
    assert made.logprobs == plain.logprobs
    assert 100 < made.stats.num_accepted_tokens <= made.stats.num_draft_tokens


@pytest.mark.parametrize("size", [VOCAB_SIZE - 10, VOCAB_SIZE + 30])
def test_a_vocabulary_may_be_the_beginning_of_the_other(
    model: Path, expected: Generated, size: int, tmp_path: Path
) -> None:
    draft = make_model(tmp_path, vocab_size=size)
    made = run(model, speculative_config=drafts_of(draft))
    assert made.texts == expected.texts
    assert made.proposed
    tokens = [token for _, _, drafts in made.proposed for token in drafts]
    assert max(tokens) < min(size, VOCAB_SIZE)
    # No drafts behind a token that the draft model does not have.
    for key, position, _ in made.proposed:
        request = REQUESTS[key[0] - 1]
        assert max([*request.prompt, *request.output, *expected.tokens[key][:position]]) < size


def test_requests_that_want_no_drafts_get_none(model: Path, twin: Path, expected: Generated) -> None:
    asked = [dataclasses.replace(each, sampling=SamplingParams()) for each in REQUESTS]
    for each, original in zip(asked, REQUESTS, strict=True):
        each.sampling.CopyFrom(original.sampling)
    asked[0].sampling.num_speculative_tokens = 0
    made = run(model, asked, speculative_config=drafts_of(twin))
    assert made.texts == expected.texts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "same"}, "model=same with quantization=auto drafts with the served model as it is"),
        ({"model": "/nowhere"}, "speculative_config: model='/nowhere'"),
        ({"quantization": "fp8"}, "quantization=fp8"),
    ],
)
def test_what_cannot_draft_is_refused_before_weights_are_read(
    model: Path, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PermanentError, match=message):
        run(make_tiny_model(tmp_path), speculative_config=drafts_of(**{"model": model, **changes}))


def test_another_vocabulary_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    draft = make_model(tmp_path / "other")
    tokenizer = draft / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("w17", "x17"))
    with pytest.raises(
        PermanentError, match=r"of target .101 tokens. and its draft model other .*token 17 is '▁w17' in"
    ):
        run(model, speculative_config=drafts_of(draft))


def test_blocks_of_both_models_share_the_memory(model: Path, twin: Path) -> None:
    given = {
        "model": str(model),
        "dtype": "float32",
        "block_size": 8,
        "max_num_seqs": 4,
        "kv_cache_memory": 0.001,
        "worker_threads": 1,
    }
    alone = build_cpu_runner(Options(**given))  # type: ignore[arg-type]
    both = build_cpu_runner(Options(**given, speculative_config=drafts_of(twin)))  # type: ignore[arg-type]
    # One spare block for each sequence.
    assert both.model_info.num_blocks == (alone.model_info.num_blocks + 1 - 4) // 2 - 1
    assert both.drafter == "draft_model draft (float32)"
