"""The beam search finds what transformers finds, given the same model's logprobs."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from protos.inference_pb2 import TokenLogprob
from router.search.beams import BeamSearch
from tests.support.models.beams import transformers_beams

VOCAB_SIZE = 60
PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6, 5], [3, 5, 8, 9, 7], [9, 3, 2, 3]]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Its weights are larger than usual: tokens differ in their probability, and some outputs end early."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def found(model: LlamaForCausalLM, prompt: list[int], search: BeamSearch) -> BeamSearch:
    while not search.done:
        beams = torch.tensor([prompt + beam.token_ids for beam in search.live])
        logprobs = model(beams).logits[:, -1].float().log_softmax(-1)
        top = logprobs.topk(search.num_needed)
        search.advance(
            [
                [
                    TokenLogprob(token_id=token_id, logprob=logprob)
                    for token_id, logprob in zip(ids, values, strict=True)
                ]
                for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ]
        )
    return search


@pytest.mark.parametrize(
    ("end_ids", "min_tokens"), [((), 0), ((7, 11, 13), 0), (range(2, 60, 5), 0), (range(2, 60, 5), 4)]
)
def test_it_finds_what_transformers_finds(model: LlamaForCausalLM, end_ids: Sequence[int], min_tokens: int) -> None:
    lengths = set()
    for prompt, width, penalty in itertools.product(PROMPTS, (2, 4), (-1.0, 0.0, 1.0, 2.0)):
        asked: dict[str, Any] = {"width": width, "length_penalty": penalty, "max_tokens": MAX_TOKENS}
        asked |= {"min_tokens": min_tokens, "end_ids": end_ids}
        outputs, scores = transformers_beams(model, prompt, **asked)
        best = found(model, prompt, BeamSearch(**asked)).finished
        assert [each.beam.token_ids for each in best] == outputs, (prompt, width, penalty)
        assert [each.score for each in best] == pytest.approx(scores, rel=2e-6)
        lengths |= {len(each) for each in outputs}
    # Otherwise this shows nothing about ends.
    assert (len(lengths) > 2) == bool(end_ids)


def test_logprobs_are_those_of_each_output(model: LlamaForCausalLM) -> None:
    search = BeamSearch(width=3, length_penalty=1, max_tokens=5, end_ids=(7,), num_logprobs=2)
    for score, beam in found(model, PROMPTS[0], search).finished:
        entries = beam.logprobs()
        assert [entry.chosen.token_id for entry in entries] == beam.token_ids
        assert {len(entry.top) for entry in entries} == {2}
        assert sum(entry.chosen.logprob for entry in entries) / len(entries) == pytest.approx(score)
