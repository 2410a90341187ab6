"""Model families on layouts of ranks: a sample of `python -m benchmarks.parallel.matrix`, which runs all pairs.

Each family meets layouts of several kinds, and each layout several families.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models.families import families_in, make_model
from tests.support.models.layouts import NUM_SAID, Layout, run_layout
from tests.support.models.rank_pool import RankPool

_TENSOR_2, _TENSOR_4, _STAGES_2, _STAGES_4 = Layout(tensor=2), Layout(tensor=4), Layout(stages=2), Layout(stages=4)
_TENSOR_AND_STAGES = Layout(tensor=2, stages=2)
_EXPERTS_2 = Layout(replicas=2, has_expert_parallel=True)
_EXPERTS_4 = Layout(tensor=2, replicas=2, has_expert_parallel=True)
SAMPLE = {
    "llama": (_TENSOR_2, _STAGES_4),
    "llama4": (_TENSOR_4, _STAGES_2, _EXPERTS_4),
    "mistral": (_TENSOR_AND_STAGES,),
    "mixtral": (_TENSOR_4, _STAGES_4, _EXPERTS_2),
    "olmo2": (_TENSOR_4, _STAGES_2),
    "phi3": (_TENSOR_2, _STAGES_4),
    "qwen2": (_TENSOR_2, _STAGES_2),
    "qwen3": (_TENSOR_4, _TENSOR_AND_STAGES),
    "qwen3-moe": (_TENSOR_2, _STAGES_2, _EXPERTS_4),
    "deepseek-v3": (_TENSOR_4, _TENSOR_AND_STAGES, _EXPERTS_2),
    "gemma2": (_TENSOR_2,),
    "gemma3": (_TENSOR_2, _STAGES_4),
    "glm4": (_STAGES_2,),
    "gpt-oss": (_EXPERTS_4,),
    "granite": (_TENSOR_AND_STAGES,),
    "mamba2": (_TENSOR_4, _TENSOR_AND_STAGES),
    "olmo3": (_TENSOR_2,),
    "phi4": (_TENSOR_2,),
    "qwen2-moe": (_EXPERTS_2,),
    "qwen3-next": (_TENSOR_4, _STAGES_2, _EXPERTS_4),
    "smollm3": (_STAGES_4,),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


def test_every_family_is_in_the_sample() -> None:
    assert SAMPLE.keys() == set(families_in("ranks"))


@pytest.mark.parametrize("family", SAMPLE)
def test_tokens_and_logprobs_are_those_of_transformers(family: str, pool: RankPool, tmp_path: Path) -> None:
    """With prompts in chunks, preemptions, and prefix cache hits."""
    reference = make_model(family, tmp_path)
    for layout in SAMPLE[family]:
        outcome = run_layout(pool, tmp_path, reference, layout)
        assert outcome.error < 1e-4, str(layout)
        assert outcome.num_equal == NUM_SAID, str(layout)
        # Replicas that share experts can't be frozen while the prompts arrive, so that time decides.
        assert outcome.num_preemptions or layout.has_expert_parallel, str(layout)
        assert outcome.num_prefix_hits, str(layout)
        assert outcome.num_chunked, str(layout)
