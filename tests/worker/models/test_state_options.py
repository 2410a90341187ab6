"""Options of models whose layers carry a state: what cannot work is refused by name before weights are read, and blocks
suit the states."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.load import load_options
from configs.options import Options
from octavo.cluster.runtime_files import write_options
from protos import step_pb2
from tests.support.models.families import make_model
from tests.support.scheduler.steps import drafting
from worker.cpu.build import build_cpu_runner
from worker.errors import PermanentError, PlanError
from worker.gpu.build import _make_backend
from worker.layers.kv_cache import KVCache, automatic_block_size
from worker.models.config import config_from_directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("states")
    for family in ("mamba2", "llama"):
        make_model(family, directory / family)
    return {family: directory / family for family in ("mamba2", "llama")}


def options_of(model: Path, **changes: Any) -> Options:
    fields = {
        "model": str(model),
        "dtype": "float32",
        "kv_cache_memory": 0.01,
        "worker_threads": 1,
        "max_model_len": 64,
    }
    return Options(**{**fields, **changes})


def test_drafts_are_refused(models: dict[str, Path]) -> None:
    said = "speculative_config: Mamba2ForCausalLM has layers that carry a state .* leave speculative_config out"
    with pytest.raises(PermanentError, match=said):
        build_cpu_runner(options_of(models["mamba2"], speculative_config={"method": "ngram"}))
    drafter = {"method": "draft_model", "model": str(models["mamba2"])}
    with pytest.raises(PermanentError, match=r"speculative_config: model='.*mamba2' has layers that carry a state"):
        build_cpu_runner(options_of(models["llama"], speculative_config=drafter))


def test_gpus_are_refused(models: dict[str, Path]) -> None:
    config = config_from_directory(models["mamba2"])
    device: Any = SimpleNamespace(torch_device=torch.device("cpu"))
    with pytest.raises(PermanentError, match=r"device=cuda: Mamba2ForCausalLM .* computed on CPUs only so far"):
        _make_backend(options_of(models["mamba2"], device="cuda"), device, config, rank=0)


def test_large_blocks_are_for_states_and_gpus(models: dict[str, Path]) -> None:
    with pytest.raises(PermanentError, match="block_size=64 is for GPUs only: use 8, 16 or 32 on a CPU"):
        build_cpu_runner(options_of(models["llama"], block_size=64))
    with pytest.raises(PermanentError, match="block_size=256 is for models with layers that carry a state only: use 8"):
        build_cpu_runner(options_of(models["llama"], block_size=256))
    assert build_cpu_runner(options_of(models["mamba2"], block_size=64)).model_info.block_size == 64


def test_blocks_suit_the_states_unless_a_size_is_given(models: dict[str, Path], tmp_path: Path) -> None:
    """Processes of a cluster read their options from a file, which must not turn the default into a given size."""
    info = build_cpu_runner(options_of(models["mamba2"])).model_info
    assert (info.block_size, info.carries_states) == (512, True)
    info = build_cpu_runner(options_of(models["llama"])).model_info
    assert (info.block_size, info.carries_states) == (16, False)
    given = load_options(write_options(options_of(models["mamba2"], block_size=16), tmp_path), environ={})
    assert build_cpu_runner(given).model_info.block_size == 16
    default = load_options(write_options(options_of(models["mamba2"]), tmp_path), environ={})
    assert build_cpu_runner(default).model_info.block_size == 512


def test_states_count_as_memory(models: dict[str, Path]) -> None:
    """A block holds the state of each layer, whatever the block's size and the dtype of keys and values."""
    config = config_from_directory(models["mamba2"])
    window, matrix = 3 * (64 + 2 * 48), 8 * 12 * 8
    assert KVCache.block_bytes(config, 16, torch.bfloat16) == 4 * 4 * (window + matrix)
    assert automatic_block_size(config, torch.bfloat16, 16) == 512
    num_blocks = build_cpu_runner(options_of(models["mamba2"])).model_info.num_blocks
    assert num_blocks == int(0.01 * 2**30) // (16 * (window + matrix)) - 1


def test_too_many_ranks_are_refused(models: dict[str, Path]) -> None:
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size=8 does not divide the model's .*n_groups.*, 4; 1, 2, 4 do"
    ):
        build_cpu_runner(options_of(models["mamba2"], tensor_parallel_size=8))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (drafting({0: [1]}), "rows_with_drafts: the layers carry a state"),
        (
            {"new_rows": [step_pb2.NewRow(row=0, sequence=1, token_ids=[1] * 12, num_computed_tokens=9)]},
            "new_rows: row 0 has num_computed_tokens=9: .* whole blocks of 8 tokens",
        ),
    ],
)
def test_plans_that_states_cannot_follow_are_refused(models: dict[str, Path], changes: Any, said: str) -> None:
    """A scheduler that does not know of states would make such plans."""
    runner = build_cpu_runner(options_of(models["mamba2"], block_size=8))
    with pytest.raises(PlanError, match=said):
        runner.execute(step_pb2.StepPlan(step=1, **changes))
