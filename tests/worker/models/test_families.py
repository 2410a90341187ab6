"""Tiny models of every family against transformers, through files that transformers writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kernels import cpu_backend
from runtime.model_files import resolve_model
from tests.support.models.families import VOCAB_SIZE, families_in, tiny_model
from tests.support.models.model_runs import ModelRun, relative_error, typical_error
from worker.models.loader import LoadedModel, load_model


@pytest.fixture(scope="module", params=families_in("odd"))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, LoadedModel]:
    reference = tiny_model(request.param, "odd")
    path: Path = tmp_path_factory.mktemp("model")
    reference.save_pretrained(path)
    return reference, load_model(resolve_model(str(path)), dtype=torch.float32)


def _prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def test_logits(pair: tuple[PreTrainedModel, LoadedModel]) -> None:
    """The prompt is longer than the window and than several blocks. Two float32 implementations differ only by
    rounding."""
    reference, loaded = pair
    prompt = _prompt(70)
    run = ModelRun(loaded)
    logits_TV = run.step([(run.row(prompt, 70), 70)])
    assert logits_TV.dtype is torch.float32
    assert relative_error(logits_TV, _reference_logits(reference, prompt)) < 1e-4


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_chunks_prefixes_and_decodes_in_one_batch(pair: tuple[PreTrainedModel, LoadedModel], block_size: int) -> None:
    """A chunk over a cached prefix, decodes and fresh prompts share steps; each row's logits equal those of its whole
    prompt."""
    reference, loaded = pair
    run = ModelRun(loaded, block_size=block_size)
    prompts = [_prompt(length, seed) for seed, length in enumerate((61, 3, 33, 17))]
    rows = [run.row(prompt, len(prompt)) for prompt in prompts]
    got: list[list[torch.Tensor]] = [[] for _ in rows]
    steps = [[(0, 20), (1, 1)], [(1, 1), (0, 13), (2, 32)], [(2, 1), (1, 1), (3, 17), (0, 7)], [(0, 1)], [(0, 20)]]
    for step in steps:
        logits_TV = run.step([(rows[index], count) for index, count in step])
        for (index, _), part in zip(step, logits_TV.split([count for _, count in step]), strict=True):
            got[index].append(part)
    for prompt, parts in zip(prompts, got, strict=True):
        assert relative_error(torch.cat(parts), _reference_logits(reference, prompt)) < 1e-4


def test_a_shared_prefix_is_read_from_anothers_blocks(pair: tuple[PreTrainedModel, LoadedModel]) -> None:
    reference, loaded = pair
    run = ModelRun(loaded)
    first, second = _prompt(40), _prompt(32) + _prompt(9, seed=5)
    writer = run.row(first, 40)
    run.step([(writer, 40)])
    reader = run.row(second, 41)
    reader.blocks[:2] = writer.blocks[:2]
    reader.num_computed = 32
    logits_TV = run.step([(reader, 9)])
    assert relative_error(logits_TV, _reference_logits(reference, second)[32:]) < 1e-4


def test_without_native_kernels(
    pair: tuple[PreTrainedModel, LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler PyTorch computes the same layers, with another KV layout."""
    reference, _ = pair
    monkeypatch.setattr(cpu_backend, "native_kernels", lambda: None)
    reference.save_pretrained(tmp_path)
    loaded = load_model(resolve_model(str(tmp_path)), dtype=torch.float32)
    assert loaded.model.backend.name == "cpu-onednn-float32"
    run, prompt = ModelRun(loaded), _prompt(70)
    row = run.row(prompt, 70)
    logits_TV = torch.cat([run.step([(row, count)]) for count in (40, 1, 29)])
    assert relative_error(logits_TV, _reference_logits(reference, prompt)) < 1e-4


def test_bfloat16_errs_no_more_than_transformers(pair: tuple[PreTrainedModel, LoadedModel], tmp_path: Path) -> None:
    reference, _ = pair
    prompt = _prompt(70)
    exact = _reference_logits(reference, prompt)
    reference.save_pretrained(tmp_path)
    theirs = type(reference).from_pretrained(tmp_path, dtype=torch.bfloat16)
    run = ModelRun(load_model(resolve_model(str(tmp_path)), dtype=torch.bfloat16), dtype=torch.bfloat16)
    row = run.row(prompt, 70)
    ours = torch.cat([run.step([(row, 60)]), *(run.step([(row, 1)]) for _ in range(10))])
    # If a router scores two experts nearly equally, rounding decides, so the error of a typical token is compared.
    error = typical_error if hasattr(reference.config, "num_experts_per_tok") else relative_error
    assert error(ours, exact) <= 1.5 * error(_reference_logits(theirs, prompt), exact)


def test_chunks_change_no_bit_and_greedy_tokens_are_those_of_logits(
    pair: tuple[PreTrainedModel, LoadedModel],
) -> None:
    """With C++ kernels, whose results do not depend on what else is in a step."""
    _, loaded = pair
    prompt = _prompt(60)
    whole, chunked, greedy = (ModelRun(loaded) for _ in range(3))
    expected_TV = whole.step([(whole.row(prompt, 60), 60)])
    row, other = chunked.row(prompt, 60), chunked.row(_prompt(9, seed=3), 9)
    steps = [[(row, 21)], [(other, 8), (row, 1)], [(row, 37), (other, 1)], [(row, 1)]]
    got_TV = [
        part
        for step in steps
        for (each, _), part in zip(step, chunked.step(step).split([count for _, count in step]), strict=True)
        if each is row
    ]
    assert torch.equal(torch.cat(got_TV), expected_TV)
    token_ids_S, largest_S = greedy.greedy_step([(greedy.row(prompt, 60), 60)])
    assert torch.equal(token_ids_S, expected_TV.argmax(-1))
    assert torch.equal(largest_S, expected_TV.max(-1).values)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.12), ("int4", 0.7)])
def test_integer_weights_change_logits_little(
    pair: tuple[PreTrainedModel, LoadedModel], quantization: Any, most: float, tmp_path: Path
) -> None:
    """Errors of a typical token: random weights are harder to round than trained ones. A wrong order of
    weights errs by more than 1."""
    reference, _ = pair
    reference.save_pretrained(tmp_path)
    run = ModelRun(load_model(resolve_model(str(tmp_path)), dtype=torch.float32, quantization=quantization))
    prompt = _prompt(30)
    error = typical_error(run.step([(run.row(prompt, 30), 30)]), _reference_logits(reference, prompt))
    assert error < most, error
