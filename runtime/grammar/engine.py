"""The interface of a grammar engine, for constrained outputs. Routers check constraints with it; workers mask tokens.

An engine knows one model's vocabulary. A matcher's state is a function of its constraint and the tokens it has taken,
so that any worker continues where another one stopped.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from protos.inference_pb2 import Constraint, ReasoningMarks, SamplingParams

if TYPE_CHECKING:
    # Routers need constraints without it.
    import numpy as np


# Bytes of a schema, regular expression, grammar, structural tag, or of all choices together; also of the text that is
# made of one of them.
MAX_TEXT_BYTES = 65_536
MAX_CHOICES = 1_024
# Bytes of the text after which a constraint begins.
MAX_AFTER_BYTES = 256
# Brackets within brackets, of JSON, a regular expression or a grammar. The library compiles them recursively: 10,000
# overflow its stack.
MAX_DEPTH = 48
# Values of an enum.
MAX_ENUM = 4_096
# minItems, maxItems, minProperties and maxProperties: each item is a rule of its own.
MAX_ITEMS = 4_096
# minLength and maxLength.
MAX_LENGTH = 1_000_000
# Repetitions of one part of a regular expression or grammar.
MAX_REPEAT = 10_000
# Integers above are not exact where JSON's numbers are doubles.
MAX_INTEGER = 2**53
# Schemas within a JSON schema.
MAX_SCHEMAS = 8_192

# Reading and compiling one constraint, in the process that does it.
COMPILE_SECONDS = 2.0
COMPILE_MIB = 512


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A bound on the tokens of an output's reasoning, which then ends as the marks say."""

    num_tokens: int
    marks: ReasoningMarks

    @classmethod
    def of(cls, sampling: SamplingParams) -> Self | None:
        """Returns the budget of a resolved request; None: it has none, or no reasoning to bound."""
        if not sampling.HasField("reasoning_marks"):
            return None
        return cls(sampling.thinking_token_budget, sampling.reasoning_marks)


class ConstraintError(ValueError):
    """A constraint that cannot be honoured. The message names the keyword or the place, and what would work."""


class OverBoundError(ConstraintError):
    """It took too much time or memory: at another time, or on another machine, it may be compiled."""


class EngineError(ValueError):
    """Nothing can be compiled for the model. The message says why."""


class Matcher(ABC):
    """Where an output is in its grammar. Its methods may take milliseconds; those of different matchers may run at
    once, on any thread, and release the interpreter's lock while they compute."""

    @abstractmethod
    def fill_mask(self, mask_W: "np.ndarray") -> bool:
        """Writes which tokens may come next: int32 [W], token v is bit v % 32 of word v // 32. The tokens that end an
        output may come where it is complete. Returns False if there is no error and no forced token."""

    @abstractmethod
    def take(self, token_id: int) -> bool:
        """Takes the next token. Returns False if it may not come here; the matcher stays as it was then."""

    @abstractmethod
    def forced_tokens(self, most: int) -> list[int]:
        """Returns the tokens, at most so many, that must come next: each is the only one that its mask would leave.

        None where text could also be written with other tokens than these.
        """

    @abstractmethod
    def copy(self) -> Self:
        """Returns a matcher in the same state."""

    @property
    def is_free(self) -> bool:
        """True if any token may come next, so that no mask is needed."""
        return False

    @property
    @abstractmethod
    def error(self) -> str:
        """Why no token can be found any more, such as a limit that was reached; mostly empty."""


class ConstraintCompiler(ABC):
    """An engine as routers use it."""

    @abstractmethod
    def canonical(self, constraint: Constraint) -> Constraint:
        """Returns the same constraint as text that does not depend on defaults or formatting. Checks that it can be
        honoured, which may take as long as the limits allow. Raises ConstraintError, EngineError."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Frees what is held beside memory, such as a process. Called once, by the last user."""
