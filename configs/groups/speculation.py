"""The option of speculative decoding: how drafts are made, and how many.

A draft is accepted if and only if the position's own draw gives the same token, so no choice here changes an output.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from configs.groups.field import SCHEDULING, json_text, option
from configs.quantization import QuantizationOption

MAX_SPECULATIVE_TOKENS = 16
# Methods by which the workers draft; the others draft in the scheduler, from tokens alone.
WORKER_METHODS = ("draft_model", "eagle", "eagle3", "mtp")
# As `model` of the method draft_model: the served model's own weights, in another quantization.
SAME_MODEL = "same"


class SpeculativeConfig(BaseModel):
    """Where a name is vLLM's it means what it means there."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # auto: suffix, and for each request the draft model instead where it is right more often, if `model` names one.
    # ngram: what followed the last tokens where they came before in the prompt or output. suffix: what followed the
    # longest such match most often, in this request and in recent outputs. draft_model: a smaller model in the workers.
    # eagle, eagle3: a head over the model's hidden states, from `model`. mtp: the checkpoint's own such layer.
    method: Literal["auto", "ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"] = "auto"
    # Upper bound of the drafts of a sequence in one step. How many it gets follows from how many were accepted lately,
    # and from what steps cost; mostly fewer, and none where they do not pay.
    num_speculative_tokens: int = Field(8, ge=1, le=MAX_SPECULATIVE_TOKENS)
    # Tokens of the n-grams that are looked for, the longest first.
    prompt_lookup_min: int = Field(2, ge=1, le=32)
    prompt_lookup_max: int = Field(5, ge=1, le=32)
    # Outputs of a tenant that its later requests draft from, with the same cache_salt; the latest ones. 0: none.
    suffix_decoding_max_cached_requests: int = Field(0, ge=0, le=10_000)
    # The draft model or the heads, as in the option `model`; "same" for the served model's own weights. Empty: none.
    model: str = ""
    # As the options of these names; they hold for the draft model.
    quantization: QuantizationOption = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} is above prompt_lookup_max={self.prompt_lookup_max}: give "
                "at most as many"
            )
        if self.method in ("draft_model", "eagle", "eagle3") and not self.model:
            raise ValueError(f"method={self.method} needs a model: give its directory or name")
        if self.method in ("ngram", "suffix", "mtp") and self.model:
            raise ValueError(f"model={self.model!r} with method={self.method}, which uses none: leave it out")
        if self.model == SAME_MODEL and self.method not in ("auto", "draft_model"):
            raise ValueError(f"model={SAME_MODEL} goes with method=draft_model, not with {self.method}")
        return self

    @property
    def drafts_in_workers(self) -> bool:
        return self.method in WORKER_METHODS or bool(self.model)


_FROM_TEXT = json_text('{"method": "ngram"}', empty=lambda: None)


class SpeculationOptions(BaseModel):
    """Part of configs.options.Options, which validates all groups."""

    speculative_config: Annotated[SpeculativeConfig | None, _FROM_TEXT] = option(
        SCHEDULING,
        None,
        'Speculative decoding, as a JSON object such as {"method": "ngram", "num_speculative_tokens": 4}. Draft tokens '
        "are verified several in a step; outputs are the same with and without. method: auto (default), ngram, suffix, "
        "draft_model, eagle, eagle3 or mtp. The other fields: num_speculative_tokens, prompt_lookup_min, "
        "prompt_lookup_max, suffix_decoding_max_cached_requests, model, quantization, dtype. Empty: none.",
    )
