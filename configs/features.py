"""Features of requests that not every replica has: workers and schedulers announce theirs by these names.

A release that honours one more field of SamplingParams adds it here. Earlier ones ignore the field, so they must not
get a request that sets it.
"""

from typing import Any

# Only of workers with a grammar engine and the model's tokenizer.
CONSTRAINT = "constraint"
THINKING_BUDGET = "thinking_token_budget"
# Images and videos: only of workers whose model takes them, and of schedulers that pass them on.
ITEMS = "items"
# Fields of SamplingParams, and the feature that honours each; features have the names that clients know.
_OF_FIELDS = {
    "allowed_token_ids": "allowed_token_ids",
    "bad_word_token_ids": "bad_words",
    "logprob_token_ids": "logprob_token_ids",
    "repetition_detection": "repetition_detection",
    "constraint": CONSTRAINT,
    # Without marks there is no reasoning to bound.
    "reasoning_marks": THINKING_BUDGET,
}
# A beam search that needs more logprobs than earlier workers return: they fail at more than 20.
WIDE_SEARCH = "beam_search.width"
# What any worker of this version honours.
OF_WORKERS = frozenset({"allowed_token_ids", "bad_words", "logprob_token_ids", WIDE_SEARCH})
# What a scheduler of this version honours by itself, whatever its workers are.
OF_SCHEDULERS = frozenset({"repetition_detection"})


def of_worker(model: Any) -> frozenset[str]:
    """Returns what a worker with this ModelInfo honours."""
    of_grammars = {CONSTRAINT, THINKING_BUDGET} if model.grammar_engine else set[str]()
    return OF_WORKERS | of_grammars | ({ITEMS} if model.media_json else set())


def needed_by(sampling: Any) -> frozenset[str]:
    """Returns the features that a SamplingParams message needs; mostly none."""
    fields = (field.name for field, _ in sampling.ListFields())
    return frozenset(_OF_FIELDS[name] for name in fields if name in _OF_FIELDS)


def named(features: frozenset[str]) -> str:
    """Returns the features as errors name them: as fields, the first of which begins the text."""
    first, *others = sorted(features)
    field = first if first in (WIDE_SEARCH, ITEMS) else f"sampling.{first}"
    return f"{field} is set" + (f", with {', '.join(others)}" if others else "")
