"""The sampling parameters of a request, in one table, and the bounds of its lists.

Every edge reads it: the router's and the worker's checks, the HTTP schema, vLLM's and KServe's messages, the command's
flags. The clients' typed classes, protos/inference.proto and the docs are compared with it by
tests/repository/test_sampling_table.py.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One numeric field of `SamplingParams` in protos/inference.proto."""

    name: str
    kind: type[int] | type[float] = float
    low: int
    high: int
    # True if `low` itself is out of range.
    low_is_open: bool = False
    default: float
    # The model's generation_config.json may give another default: the field is optional on the wire.
    from_model: bool = False
    # A value that changes the sampled tokens.
    example: float
    # The valid values as errors name them, if the range alone is not enough.
    advice: str = ""
    # One or two sentences, shown in flags and docs.
    doc: str

    @property
    def range(self) -> str:
        return f"{'(' if self.low_is_open else '['}{self.low}, {self.high}]"

    @property
    def what_works(self) -> str:
        return self.advice or f"a number in {self.range}"

    def contains(self, value: float) -> bool:
        """False for NaN."""
        above = value > self.low if self.low_is_open else value >= self.low
        return math.isfinite(value) and above and value <= self.high

    def given_in(self, message: Any) -> bool:
        """True if a SamplingParams message sets it: an unset optional field reads as 0, which is not its value."""
        return not self.from_model or message.HasField(self.name)

    def value_in(self, message: Any) -> float:
        """A SamplingParams message's value, or the default."""
        return getattr(message, self.name) if self.given_in(message) else self.default


PARAMETERS = (
    Parameter(name="temperature", low=0, high=100, default=1.0, from_model=True, example=0.7, doc="0 is greedy."),
    Parameter(
        name="top_p",
        low=0,
        low_is_open=True,
        high=1,
        default=1.0,
        from_model=True,
        example=0.9,
        doc="Keep the most likely tokens that together have this probability.",
    ),
    Parameter(
        name="top_k",
        kind=int,
        low=-1,
        high=2**31 - 1,
        default=0,
        from_model=True,
        advice="at least 1, or 0 or -1 for off",
        example=5,
        doc="Keep this many of the most likely tokens; 0 or -1: all.",
    ),
    Parameter(
        name="min_p",
        low=0,
        high=1,
        default=0.0,
        from_model=True,
        example=0.01,
        doc="Drop tokens below this fraction of the best token's probability.",
    ),
    Parameter(
        name="repetition_penalty",
        low=0,
        low_is_open=True,
        high=10,
        default=1.0,
        from_model=True,
        example=1.1,
        doc="Above 1: tokens seen before become less likely.",
    ),
    Parameter(
        name="presence_penalty",
        low=-2,
        high=2,
        default=0.0,
        example=0.1,
        doc="Above 0: tokens of the output become less likely.",
    ),
    Parameter(
        name="frequency_penalty",
        low=-2,
        high=2,
        default=0.0,
        example=0.1,
        doc="Above 0: tokens of the output become less likely with each occurrence.",
    ),
    Parameter(
        name="top_n_sigma",
        low=0,
        high=100,
        default=0.0,
        example=1.0,
        doc="Keep tokens whose logit is at most this many standard deviations below the largest; 0: all.",
    ),
)
BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}
# Parameters whose default a model may set.
FROM_MODEL = tuple(parameter for parameter in PARAMETERS if parameter.from_model)

MAX_CHOICES = 64
# Beams of a beam search, and the bound of its length_penalty, up or down.
MAX_BEAM_WIDTH = 32
LARGEST_LENGTH_PENALTY = 10
# The default of option max_logprobs, which replicas that announce none have; and its highest value: 49 KB a position
# with the tokens' text, of which a step may have thousands.
MAX_LOGPROBS, MOST_LOGPROBS = 20, 1024
# In a uint32: logprobs of all tokens.
ALL_LOGPROBS = 2**32 - 1
MAX_LOGPROB_TOKENS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 1024
# Token sequences, and the tokens of all together. A word of bad_words becomes one sequence or two.
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
# The scheduler compares each token with so many before it.
MAX_PATTERN_SIZE = 1024
# A token's bias is between -LARGEST_LOGIT_BIAS and LARGEST_LOGIT_BIAS.
LARGEST_LOGIT_BIAS = 100


def out_of_range(message: Any) -> tuple[Parameter, float] | None:
    """The first parameter of a SamplingParams message that is out of its range, and its value."""
    for parameter in PARAMETERS:
        value = getattr(message, parameter.name)
        if parameter.given_in(message) and not parameter.contains(value):
            return parameter, value
    return None
