"""Compares a model that runs with model_impl=transformers with transformers itself, and with itself in other steps."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from runtime.model_files import resolve_model
from tests.support.models.model_runs import ModelRun, relative_error
from worker.models.loader import LoadedModel, load_model
from worker.weights.quantization.kinds import QuantizationOption

# Odd lengths; the first is longer than a window of 11, and than two blocks.
_LENGTHS = (37, 5, 1, 22)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    # max |a - b| / max |b| of the logits of a prompt, at all positions.
    error: float
    # Tokens of one greedy output that are those of transformers, and how many there are.
    num_equal: int
    num_tokens: int
    # Steps whose logits differ in any bit from those of the prompt computed alone, in one step.
    different: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        return self.error <= 1e-4 and self.num_equal == self.num_tokens and not self.different


def load(
    directory: Path, *, dtype: torch.dtype = torch.float32, quantization: QuantizationOption = "auto"
) -> LoadedModel:
    return load_model(resolve_model(str(directory)), dtype=dtype, quantization=quantization, model_impl="transformers")


def check(reference: PreTrainedModel, loaded: LoadedModel, *, num_tokens: int = 64) -> Checked:
    """Runs prompts alone, in chunks, beside others, behind a cached prefix, and again after a preemption."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 120, (length,), generator=generator).tolist() for length in _LENGTHS]
    prompt, *others = prompts
    run = ModelRun(loaded, block_size=16)
    whole = run.step([(run.row(prompt, 112), len(prompt))])
    expected = _logits(reference, prompt)
    parts: dict[str, torch.Tensor] = {}
    row = run.row(prompt, 112)
    parts["chunked"] = torch.cat([run.step([(row, count)]) for count in (1, 17, 2, 16, 1)])
    parts["beside others"] = _beside(run, prompt, others)
    writer = run.row([*prompt[:32], 3, 4, 5], 64)
    run.step([(writer, 20)])
    run.step([(writer, 15)])
    reader = run.row(prompt, 112)
    reader.blocks[:2], reader.num_computed = writer.blocks[:2], 32
    parts["prefix hit"] = torch.cat([whole[:32], run.step([(reader, len(prompt) - 32)])])
    different = [name for name, logits in parts.items() if not torch.equal(logits, whole)]
    said = run.greedy([prompt], num_tokens)[0]
    # The same sequence from its tokens, as after a preemption: the last logits of both must agree.
    again = run.row([*prompt, *said[:-1]], 112)
    logits = run.step([(again, len(again.token_ids))])
    if logits[len(prompt) - 1 :].argmax(1).tolist() != said:
        different.append("preempted")
    # A greedy token is a fold of those before it, so one pass of transformers over the output checks all.
    likeliest = _logits(reference, [*prompt, *said[:-1]])[len(prompt) - 1 :].argmax(1).tolist()
    num_equal = sum(a == b for a, b in zip(likeliest, said, strict=True))
    return Checked(
        error=relative_error(whole, expected), num_equal=num_equal, num_tokens=num_tokens, different=tuple(different)
    )


def _logits(reference: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0].float()


def _beside(run: ModelRun, prompt: list[int], others: list[list[int]]) -> torch.Tensor:
    """Returns the prompt's logits, computed in steps with other rows at changing places."""
    row, rest = run.row(prompt, 112), [run.row(other, 64) for other in others]
    parts = []
    for place, counts in enumerate(((30, 5, 1, 3), (1, 0, 0, 1), (6, 0, 0, 17))):
        scheduled = [(other, count) for other, count in zip(rest, counts[1:], strict=True) if count]
        scheduled.insert(min(place, len(scheduled)), (row, counts[0]))
        logits = run.step(scheduled).split([count for _, count in scheduled])
        parts.append(logits[min(place, len(scheduled) - 1)])
    return torch.cat(parts)
