"""The beam search of transformers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Outputs(NamedTuple):
    """The best first."""

    token_ids: list[list[int]]
    scores: list[float]


@torch.inference_mode()
def transformers_beams(
    model: Any,
    prompt: Sequence[int],
    *,
    width: int,
    length_penalty: float,
    max_tokens: int,
    min_tokens: int = 0,
    end_ids: Sequence[int] = (),
) -> Outputs:
    """Returns the `width` best outputs, each with the token that ends it. end_ids: tokens that do; a model whose
    generation_config has an EOS token needs min_tokens to go on after it."""
    told = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        early_stopping=False,
        length_penalty=length_penalty,
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens or None,
        eos_token_id=list(end_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    outputs = []
    for sequence in told.sequences[:, len(prompt) :].tolist():
        end = next((i for i, token_id in enumerate(sequence) if token_id in end_ids), len(sequence) - 1)
        outputs.append(sequence[: end + 1])
    return Outputs(outputs, told.sequences_scores.tolist())
