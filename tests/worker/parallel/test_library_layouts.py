"""Models that transformers computes, on layouts of ranks: real schedulers and workers, as users run them.

`python -m benchmarks.engine.library.grid --tensor-parallel` runs every model with a plan on two ranks.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models.layouts import NUM_SAID, Layout, run_layout
from tests.support.models.library_models import tiny_model, write
from tests.support.models.rank_pool import RankPool

_TENSOR_2, _STAGES_2 = Layout(tensor=2), Layout(stages=2)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


@pytest.mark.parametrize(
    ("model_type", "name", "layout"),
    [
        # Linear layers that gather their outputs, and split their inputs.
        ("phi3", "Phi3ForCausalLM", _TENSOR_2),
        # Three such layers with one input, and norms over all heads.
        ("olmoe", "OlmoeForCausalLM", _TENSOR_2),
        # A part of each expert on each rank; sinks of each rank's heads.
        ("granitemoe_swa", "GraniteMoeSWAForCausalLM", _TENSOR_2),
        # Windows in some layers; a scale after the head, whose vocabulary the ranks share.
        ("cohere2", "Cohere2ForCausalLM", _TENSOR_2),
        ("gpt_neox", "GPTNeoXForCausalLM", _STAGES_2),
    ],
)
def test_tokens_and_logprobs_are_those_of_transformers(
    model_type: str, name: str, layout: Layout, pool: RankPool, tmp_path: Path
) -> None:
    """With prompts in chunks, preemptions, and prefix cache hits."""
    reference = tiny_model(model_type, name)
    outcome = run_layout(pool, write(reference, tmp_path), reference, layout, model_impl="transformers")
    assert outcome.error < 1e-4
    assert outcome.num_equal == NUM_SAID
    assert outcome.num_preemptions
    assert outcome.num_prefix_hits
    assert outcome.num_chunked
