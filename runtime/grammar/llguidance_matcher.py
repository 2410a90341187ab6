"""Matchers of llguidance.

The library raises nothing for what a client sent: a matcher that fails stays in an error state, which is asked after
each call. It prints nothing at log level 0.
"""

from typing import Self

import llguidance
import numpy as np

from runtime.grammar.engine import Matcher
from runtime.grammar.vocabulary import Vocabulary


def limits() -> llguidance.LLParserLimits:
    """The library's own limits, the same in every process: a state that is over them is over them everywhere."""
    return llguidance.LLParserLimits(
        # About 20 ms for the first states of the lexer, 14 ms and 3 ms for lexer and parser of a mask.
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        # 1 to 2 KB each.
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        # An error would have the grammar's text, and what has been generated.
        verbose_errors=False,
    )


def new_matcher(grammar: str, vocabulary: Vocabulary) -> "LlguidanceMatcher":
    """Compiles a grammar; the matcher's error says if it can't be. What the library warns of is an error, too."""
    library = llguidance.LLMatcher(vocabulary.library, grammar, log_level=0, limits=limits())
    matcher = LlguidanceMatcher(library, vocabulary)
    if warnings := library.get_grammar_warnings():
        matcher.fail(summary("\n".join(warnings)))
    return matcher


class LlguidanceMatcher(Matcher):
    """Made by new_matcher()."""

    def __init__(self, library: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self._library = library
        self._vocabulary = vocabulary
        self._has_ended = False
        self._error = ""

    def fill_mask(self, mask_W: np.ndarray) -> bool:
        assert mask_W.dtype == np.int32
        assert mask_W.flags.c_contiguous
        if not self._has_ended and not self._error:
            self._library.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            # After an error the library leaves tokens that end an output.
            if np.count_nonzero(mask_W) > len(self._vocabulary.eos_token_ids):
                return False
            self._check_single(mask_W)
        if self._has_ended or self.error:
            mask_W[:] = 0
        return True

    def _check_single(self, mask_W: np.ndarray) -> None:
        """Sees to it that a token that is the only one can come.

        Bytes that must come are cut into tokens by the tokenizer. If none has one of them, as SmolLM2's has none for
        0x16, the library takes a token that is further on.
        """
        if np.count_nonzero(mask_W) != 1 or self._library.is_error():
            return
        word = int(mask_W.argmax()) if mask_W.max() > 0 else int(mask_W.argmin())
        if (bits := int(mask_W[word]) & 0xFFFFFFFF).bit_count() == 1:
            token_id = word * 32 + bits.bit_length() - 1
            if token_id not in self._vocabulary.eos_token_ids and not self._library.validate_tokens([token_id]):
                self._error = "the model has no token for a byte that must come next"

    def take(self, token_id: int) -> bool:
        if self._has_ended or not 0 <= token_id < self._vocabulary.size:
            return False
        if token_id in self._vocabulary.eos_token_ids:
            self._has_ended = self._library.is_accepting()
            return self._has_ended
        return self._library.try_consume_tokens([token_id]) == 1

    def take_bytes(self, data: bytes) -> bool:
        """Takes the end of a token. Returns False if it may not come here; the matcher stays as it was then."""
        tokens = self._vocabulary.cut(data)
        if self._has_ended or self._library.validate_tokens(tokens) != len(tokens):
            return False
        return self._library.try_consume_tokens(tokens) == len(tokens)

    def forced_tokens(self, most: int) -> list[int]:
        if self._has_ended or self.error:
            return []
        found = self._library.compute_ff_tokens()[:most]
        return found[: self._library.validate_tokens(found)] if found else []

    def copy(self) -> Self:
        copied = type(self)(self._library.deep_copy(), self._vocabulary)
        copied._has_ended, copied._error = self._has_ended, self._error
        return copied

    def fail(self, error: str) -> None:
        self._error = error

    @property
    def error(self) -> str:
        # Mostly empty; this is asked after each mask.
        return self._error or ((text := self._library.get_error()) and summary(text))


# The library's reason for a state in which no token can come.
_NOTHING_FOLLOWS = "NoExtensionBias"


def summary(error: str) -> str:
    """Returns what is wrong, without the grammar's text that the library appends."""
    first, *others = error.strip().splitlines() or [""]
    if first == _NOTHING_FOLLOWS:
        return "no output can satisfy it"
    if first.startswith("panic"):
        # With the traceback of an exception, if there was one.
        return "the library can't compute it"
    reasons = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return " ".join([first, *reasons])[:500]
