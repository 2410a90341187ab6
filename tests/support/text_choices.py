"""A small grammar engine: choices of texts over a vocabulary of bytes and a few longer tokens."""

from collections.abc import Mapping, Sequence

import numpy as np

from protos.inference_pb2 import Constraint
from runtime.grammar.engine import ConstraintError, Matcher, ThinkingBudget
from runtime.grammar.llguidance_engine import LlguidanceEngine
from runtime.grammar.reasoning.thinking import ThinkingMatcher
from worker.sampling.grammars import Grammars

# Token 3 + b is the byte b; these are longer ones.
FIRST_BYTE = 3
LONGER = {260: b"ab", 261: b"abc", 262: b'{"', 263: b'":', 264: b"name"}


# A vocabulary for models with few tokens: letters, a space and longer ones.
FEW_TOKENS = {
    9: b" ",
    **{10 + i: bytes([ord("a") + i]) for i in range(26)},
    40: b"ab",
    41: b"abc",
    42: b"the ",
    43: b"fox",
}


def vocabulary(longer: Mapping[int, bytes] = LONGER) -> dict[int, bytes]:
    return {FIRST_BYTE + byte: bytes([byte]) for byte in range(256)} | dict(longer)


def tokens_of(text: str) -> list[int]:
    """Returns the text in tokens of one byte."""
    return [FIRST_BYTE + byte for byte in text.encode()]


class Texts(Matcher):
    """The output is one of these texts, in any tokens."""

    def __init__(self, texts: Sequence[bytes], vocabulary: Mapping[int, bytes], eos: int, said: bytes = b"") -> None:
        self._texts, self._vocabulary, self._eos, self._said = texts, vocabulary, eos, said
        self._is_over = False

    def allowed(self) -> list[int]:
        """The definition of the mask."""
        if self._is_over:
            return [self._eos]
        there = [
            token
            for token, text in self._vocabulary.items()
            if any(each.startswith(self._said + text) for each in self._texts)
        ]
        return there + [self._eos] * (self._said in self._texts)

    def fill_mask(self, mask_W: np.ndarray) -> bool:
        bits = np.zeros(32 * len(mask_W), np.bool_)
        bits[self.allowed()] = True
        mask_W[:] = np.packbits(bits, bitorder="little").view("<i4")
        return int(bits.sum()) <= 1

    def take(self, token_id: int) -> bool:
        if token_id not in self.allowed():
            return False
        self._is_over = token_id == self._eos
        self._said += self._vocabulary.get(token_id, b"")
        return True

    def forced_tokens(self, most: int) -> list[int]:
        forced, ahead = [], self.copy()
        while len(forced) < most and not ahead._is_over and len(allowed := ahead.allowed()) == 1:
            forced += allowed
            ahead.take(allowed[0])
        return forced

    def copy(self) -> "Texts":
        copied = type(self)(self._texts, self._vocabulary, self._eos, self._said)
        copied._is_over = self._is_over
        return copied

    @property
    def error(self) -> str:
        return "the text is longer than this matcher can hold" if len(self._said) > 60 else ""


class TextsEngine(LlguidanceEngine):
    """Takes choices alone, without the library."""

    version = "texts-1"

    def __init__(self, eos: int, vocabulary: Mapping[int, bytes]) -> None:
        self._eos, self._tokens = eos, vocabulary

    def matcher(
        self, constraint: Constraint | None, output: Sequence[int] = (), *, thinking: ThinkingBudget | None = None
    ) -> Matcher:
        matcher: Matcher | None = None
        if constraint is not None:
            if constraint.WhichOneof("kind") != "choice":
                raise ConstraintError(f"{constraint.WhichOneof('kind')}: this engine has choices only")
            matcher = Texts([text.encode() for text in constraint.choice.texts], self._tokens, self._eos)
        if thinking is not None:
            texts = [self._tokens.get(token_id, b"") for token_id in range(max(self._tokens) + 64)]
            matcher = ThinkingMatcher(thinking, texts, matcher)
        assert matcher is not None
        for position, token in enumerate(output):
            if not matcher.take(token):
                raise ConstraintError(f"the output has token {token} at position {position}, which is not allowed")
        return matcher


def texts_grammars(eos: int, tokens: Mapping[int, bytes] | None = None, *, num_threads: int = 2) -> Grammars:
    """tokens: None: `vocabulary`."""
    tokens = vocabulary() if tokens is None else tokens
    return Grammars(lambda: TextsEngine(eos, tokens), version=TextsEngine.version, num_threads=num_threads)


def choice(*texts: str) -> Constraint:
    constraint = Constraint()
    constraint.choice.texts.extend(texts)
    return constraint
