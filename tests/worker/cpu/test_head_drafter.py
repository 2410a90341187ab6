"""Drafting heads in the worker, on tiny models: outputs are those without drafts, and each proposal is the one that a
plain reference makes for the whole sequence, so no KV is stale or misplaced."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from configs.options import Options
from kernels import cpu_backend
from protos.inference_pb2 import SamplingParams
from scheduler.settings import core_settings
from tests.support.models import heads
from tests.support.models.head_targets import Known, eagle, eagle3, llama, mtp
from tests.support.models.replica import Ranks
from tests.support.scheduler.costs import FREE
from tests.support.scheduler.generate import Asked, Generated, generate
from worker.cpu.build import build_cpu_runner
from worker.errors import PermanentError
from worker.step.runner import StepRunner

LONG = [(7 * i) % 97 for i in range(60)]
# The end of the shorter one is not that of a block: the head's last entry there would be another's.
REQUESTS = [
    Asked([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)),
    Asked(LONG, SamplingParams(temperature=1.0, top_p=0.95, seed=3, max_tokens=30, ignore_eos=True), num_choices=3),
    Asked(LONG[:37], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)),
    Asked([50] * 9, SamplingParams(temperature=1.5, seed=8, max_tokens=25, ignore_eos=True), output=[3, 4, 5]),
    Asked([9, 8], SamplingParams(temperature=0.0, logprobs=1, max_tokens=20, ignore_eos=True)),
]
PENALIZED = Asked(
    [4] * 5, SamplingParams(temperature=0.9, seed=8, repetition_penalty=1.3, max_tokens=20, ignore_eos=True)
)
# Its embedding is not finite.
POISON = heads.VOCAB - 1
POISONED = Asked([8, POISON, 9] * 6, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
NUM_DRAFTS = 4
# Which requests are greedy.
GREEDY = (1, 3, 5)


@pytest.fixture(scope="module")
def known_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Known]:
    """Returns a head by its method."""

    @cache
    def make(method: str) -> Known:
        path = tmp_path_factory.mktemp(method)
        if method == "mtp":
            return mtp(path)
        return {"eagle": eagle, "eagle3": eagle3}[method](llama(path / "target"), path / "head")

    return make


@pytest.fixture(scope="module")
def expected_of(known_of: Callable[[str], Known]) -> Callable[[str], Generated]:
    """Returns what the model of a method's head says without drafts."""
    return cache(lambda method: run(known_of(method), drafts=False))


def options_of(known: Known, *, drafts: bool, **changes: object) -> Options:
    fields: dict[str, object] = {
        "model": str(known.target.path),
        "dtype": "float32",
        "block_size": 8,
        "num_blocks_override": 120,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "worker_threads": 1,
        "max_model_len": 128,
    }
    if drafts:
        fields["speculative_config"] = {
            "method": known.method,
            "model": str(known.directory or ""),
            "num_speculative_tokens": NUM_DRAFTS,
        }
    return Options(**(fields | changes))  # type: ignore[arg-type]


def run(known: Known, *, drafts: bool, lose_at: int = 0, more: Sequence[Asked] = (), **changes: object) -> Generated:
    """more: requests beside REQUESTS."""
    options = options_of(known, drafts=drafts, **changes)
    runner = build_cpu_runner(options)
    assert runner.drafter.startswith(known.method if drafts else "")
    return generate_by(runner, options, lose_at=lose_at, more=more)


def generate_by(runner: StepRunner, options: Options, *, lose_at: int = 0, more: Sequence[Asked] = ()) -> Generated:
    settings = core_settings(
        options, runner.model_info, runner.num_swap_blocks, holds_constrained=False, drafter=runner.drafter
    )
    return generate(runner, settings, [*REQUESTS, *more], lose_at=lose_at, costs=FREE)


# Embeddings of the rigged models have numbers here, and a constant in front of them.
TOLD = slice(1, 17)


def only_the_last_token(name: str, tensor: torch.Tensor) -> None:
    """Makes the next token a function of the last one alone: layers add nothing, and drafts of EAGLE-3 have all the
    weight of the output head."""
    if "norm" in name:
        tensor.fill_(1.0)
    elif "o_proj" in name or "down_proj" in name:
        tensor.zero_()
    elif name.endswith("embed_tokens.weight"):
        tensor[:, 0], tensor[:, TOLD.stop :] = 3.0, 0.0
    elif name == "lm_head.weight":
        can_draft = heads.eagle3_tensors()["t2d"]
        tensor[~can_draft] = 0.0
        tensor[:, 0], tensor[:, TOLD.stop :] = 0.0, 0.0
    elif name.endswith("eh_proj.weight"):
        tensor.copy_(torch.eye(*tensor.shape))


def rigged(method: str, path: Path) -> Known:
    """Returns a head that passes the embedding of the last token on, so its drafts are what the model will say."""
    if method == "mtp":
        return mtp(path, ("shared_head.head.weight",), only_the_last_token)
    target = llama(path / "target", change=only_the_last_token)
    if method == "eagle":
        known, tensors = eagle(target, path / "head"), heads.eagle_tensors()
        for name, tensor in tensors.items():
            only_the_last_token(name, tensor)
        tensors["fc.weight"] = torch.eye(heads.HIDDEN, 2 * heads.HIDDEN)
        heads.write_head(path / "head", heads.EAGLE_CONFIG, tensors)
        return known
    known, tensors = eagle3(target, path / "head", norm_before_residual=True), heads.eagle3_tensors()
    tensors["lm_head.weight"] = target.head_weight
    for name, tensor in tensors.items():
        only_the_last_token(name, tensor)
    # The states add nothing. Queries and keys are the same for all tokens, and long, so that each position attends to
    # itself: rope turns others away.
    tensors["midlayer.hidden_norm.weight"].zero_()
    for kind in "qkv":
        tensors[f"midlayer.self_attn.{kind}_proj.weight"].zero_()
    for kind in "qk":
        tensors[f"midlayer.self_attn.{kind}_proj.weight"][:, 0] = 10.0
    # Each of the KV heads brings half of the numbers, to the first of the heads that read it.
    size, group = heads.HEAD_SIZE, heads.HEADS // heads.KV_HEADS
    tensors["midlayer.self_attn.v_proj.weight"][:, TOLD] = torch.eye(2 * size)
    for half in range(2):
        outputs = slice(TOLD.start + half * size, TOLD.start + (half + 1) * size)
        inputs = slice(half * group * size, half * group * size + size)
        tensors["midlayer.self_attn.o_proj.weight"][outputs, inputs] = torch.eye(size)
    tensors["lm_head.weight"] = target.head_weight[tensors["t2d"]]
    config = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "norm_before_residual": True}
    heads.write_head(path / "head", heads.EAGLE3_CONFIG | config, tensors)
    return known


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_a_head_that_is_right_is_believed(method: str, tmp_path: Path) -> None:
    known = rigged(method, tmp_path)
    expected, made = run(known, drafts=False), run(known, drafts=True)
    assert made.texts == expected.texts
    assert made.stats.num_accepted_tokens > 50
    for key, position, drafts in made.proposed:
        if key[0] in GREEDY:
            told = expected.tokens[key][position : position + len(drafts)]
            assert told == list(drafts)[: len(told)], (key, position)


SMALL = {"num_blocks_override": 22}


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("eagle", {}),
        ("eagle", {**SMALL, "max_steps_in_flight": 2}),
        ("eagle3", {}),
        ("eagle3", {"max_steps_in_flight": 2}),
        ("eagle3", SMALL),
        ("eagle3", {**SMALL, "preemption_mode": "swap", "swap_space": 0.01}),
        ("eagle3", {"enable_prefix_caching": False}),
        ("eagle3", {"max_num_batched_tokens": 16}),
        ("eagle3", {"lose_at": 9}),
        ("mtp", {**SMALL, "max_num_batched_tokens": 16}),
    ],
    ids=str,
)
def test_outputs_and_proposals(
    known_of: Callable[[str], Known], expected_of: Callable[[str], Generated], method: str, changes: dict
) -> None:
    """Also where blocks are shared, taken away, swapped, or lost with the workers."""
    known, expected = known_of(method), expected_of(method)
    made = run(known, drafts=True, **changes)
    assert made.texts == expected.texts
    assert (made.stats.num_preemptions > 0) == ("num_blocks_override" in changes)
    assert len(made.proposed) > 50
    check_proposals(known, expected, made)


def check_proposals(known: Known, expected: Generated, made: Generated) -> None:
    """Checks the drafts of greedy requests."""
    sequences = {(group, 0): [*REQUESTS[group - 1].prompt, *expected.tokens[group, 0]] for group in GREEDY}
    inputs = {key: known.inputs(known.target.states(sequence)) for key, sequence in sequences.items()}
    num_checked = 0
    for key, position, drafts in made.proposed:
        if key not in inputs:
            continue
        known_ids = sequences[key][: len(REQUESTS[key[0] - 1].prompt) + position]
        logits = known.logits(inputs[key], known_ids, drafts[:-1])
        # Logits that are closer than float32 tells may come in another order.
        chosen = logits.gather(1, torch.tensor(drafts)[:, None])[:, 0]
        assert (logits.amax(1) - chosen < 1e-3).all(), (key, position, drafts, logits.argmax(1))
        num_checked += len(drafts)
    assert num_checked > 100


def test_rows_that_fail_spoil_no_others(tmp_path: Path) -> None:
    """Their blocks are used again, for the head, too: there are few."""

    def poison(name: str, tensor: torch.Tensor) -> None:
        if name == "model.embed_tokens.weight":
            tensor[POISON] = torch.nan

    known = eagle3(llama(tmp_path / "target", change=poison), tmp_path / "head")
    more = [POISONED, PENALIZED]
    expected = run(known, drafts=False, more=more)
    options = options_of(known, drafts=True, **SMALL)
    runner = build_cpu_runner(options)
    made = generate_by(runner, options, more=more)
    assert made.texts == expected.texts
    assert any(message for _, _, message in made.texts)
    check_proposals(known, expected, made)
    runner.reset()
    assert runner._drafter is not None
    assert all(layer.isfinite().all() for layer in runner._drafter.swapped_layers)


def test_a_head_whose_numbers_are_not_finite_drafts_nothing(
    known_of: Callable[[str], Known], expected_of: Callable[[str], Generated], tmp_path: Path
) -> None:
    tensors = heads.eagle_tensors()
    tensors["fc.weight"][3, 5] = torch.nan
    broken = replace(known_of("eagle"), directory=heads.write_head(tmp_path, heads.EAGLE_CONFIG, tensors))
    made = run(broken, drafts=True)
    assert made.texts == expected_of("eagle").texts
    assert not made.proposed


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("eagle", {"tensor_parallel_size": 2}),
        ("eagle", {"pipeline_parallel_size": 2}),
        ("mtp", {"pipeline_parallel_size": 2}),
        ("eagle3", {"tensor_parallel_size": 2}),
    ],
    ids=str,
)
def test_the_rank_that_samples_has_the_whole_head(
    known_of: Callable[[str], Known], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, changes: dict
) -> None:
    """The C++ kernels of one process serve only one rank, so PyTorch computes."""
    monkeypatch.setattr(cpu_backend, "native_kernels", lambda: None)
    known = known_of(method)
    options = options_of(known, drafts=True, **changes)
    ranks = Ranks(options, tmp_path)
    assert len([each for each in ranks.drafters if each]) == 1
    made = generate_by(ranks, options)
    without = options_of(known, drafts=False, **changes)
    (tmp_path / "without").mkdir()
    expected = generate_by(Ranks(without, tmp_path / "without"), without)
    assert made.texts == expected.texts
    check_proposals(known, expected, made)


def test_states_of_another_stage_are_refused_before_weights_are_read(known_of: Callable[[str], Known]) -> None:
    known = known_of("eagle3")
    options = options_of(known, drafts=True, pipeline_parallel_size=2)
    message = "speculative_config: .*pipeline_parallel_size=2 leaves those before 0, 2 to another stage"
    for rank in range(2):
        with pytest.raises(PermanentError, match=message):
            build_cpu_runner(options, lambda fraction: pytest.fail("weights are read"), rank=rank)
