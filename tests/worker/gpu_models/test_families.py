"""Tiny models of every family on the GPU path against transformers; without a GPU, in Triton's interpreter."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kernels.backend import gpu_backend
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.gpu_runs import DictReader, GpuModelRun
from tests.support.models.families import VOCAB_SIZE, families_in, tiny_model
from tests.support.models.model_runs import relative_error
from worker.models.config import config_from_directory
from worker.models.registry import family_of, model_class


@pytest.fixture(scope="module", params=families_in("gpu"))
def reference(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param, "gpu")


def _stored(reference: PreTrainedModel, directory) -> dict[str, torch.Tensor]:
    """The tensors under their checkpoint names, which differ from transformers' for experts."""
    reference.save_pretrained(directory)
    files = family_of(type(reference).__name__).open_files(directory)
    return {name: files.read(name) for name in files.shapes}


def _run(reference: PreTrainedModel, tmp_path, dtype: torch.dtype = torch.float32, **path: Any) -> GpuModelRun:
    tensors = _stored(reference, tmp_path)
    config = config_from_directory(tmp_path)
    gpu = gpu_backend(dtype, torch.device(DEVICE), **path)
    with torch.inference_mode():
        model = model_class(config.architecture)(config, DictReader(tensors, dtype), gpu)
    return GpuModelRun(model, gpu, block_size=8, num_blocks=129, max_rows=4)


def _prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _expected(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def test_logits_of_chunks_and_decodes_in_one_batch_equal_those_of_transformers(
    reference: PreTrainedModel, tmp_path
) -> None:
    """Two prompts, longer than the window and than several blocks, one in chunks beside the other's decodes, followed
    by padding: padding rows and tokens must not affect other logits."""
    run = _run(reference, tmp_path)
    first, second = _prompt(29), _prompt(13, seed=1)
    got = {
        0: [run.step({0: first[:27]})],
        2: [],
    }
    for tokens in ({2: second[:12], 0: first[27:28]}, {0: first[28:29], 2: second[12:13]}):
        logits = run.step(tokens, padded_rows=1, padded_tokens=3)
        for row, part in zip(tokens, logits.split([len(each) for each in tokens.values()]), strict=True):
            got[row].append(part)
    for row, prompt in ((0, first), (2, second)):
        assert relative_error(torch.cat(got[row]), _expected(reference, prompt)) < 1e-4


def test_bfloat16_is_about_as_near_as_transformers_in_bfloat16(tmp_path) -> None:
    """It compares the largest errors of 20 x 131 logits, which scatter."""
    exact = tiny_model("qwen3", "gpu")
    prompt = _prompt(20)
    expected = _expected(exact, prompt)
    got = _run(exact, tmp_path, torch.bfloat16).step({1: prompt}).float()
    rounded = _expected(exact.bfloat16(), prompt)
    assert relative_error(got, expected) < 1.5 * relative_error(rounded, expected)
