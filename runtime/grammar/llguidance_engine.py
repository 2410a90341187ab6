"""Grammars computed by llguidance (https://github.com/guidance-ai/llguidance)."""

import importlib.metadata
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from protos.inference_pb2 import Constraint
from runtime.grammar.compiling.compiler import Compiler
from runtime.grammar.constraints import library_grammar
from runtime.grammar.engine import (
    COMPILE_MIB,
    COMPILE_SECONDS,
    ConstraintCompiler,
    ConstraintError,
    Matcher,
    ThinkingBudget,
)
from runtime.grammar.llguidance_matcher import LlguidanceMatcher, new_matcher
from runtime.grammar.reasoning.after import AfterMatcher, FreePart, Occurrence
from runtime.grammar.reasoning.thinking import ThinkingMatcher
from runtime.grammar.vocabulary import Vocabulary

# Constraints that are kept compiled, up to about a MiB each.
_NUM_FRESH = 32


class LlguidanceEngine(ConstraintCompiler):
    """Safe to use from several threads. close() ends the process that checks constraints, if there is one."""

    def __init__(
        self, vocabulary: Vocabulary, *, compile_seconds: float = COMPILE_SECONDS, compile_mib: int = COMPILE_MIB
    ) -> None:
        """compile_seconds, compile_mib: what compiling a constraint may take; else canonical() refuses it."""
        # Part of the replica's fingerprint: name and version of the library.
        self.version = f"llguidance {importlib.metadata.version('llguidance')}"
        self._vocabulary = vocabulary
        found = vocabulary
        self._compiler = Compiler(found.directory, found.size, found.eos_token_ids, compile_seconds, compile_mib)
        self._occurrence = lru_cache(16)(
            lambda text: Occurrence(text.encode(), vocabulary.token_texts, vocabulary.sorted_texts)
        )
        # Matchers that have taken nothing. The rows of a batch often have the same constraint: a copy takes 12 us,
        # compiling it again 0.9 ms.
        self._fresh = lru_cache(_NUM_FRESH)(self._compiled)
        # The tokens that free text may have: all but those that end it.
        self._free_W = np.zeros((vocabulary.size + 31) // 32, np.uint32)
        for token_id, text in enumerate(vocabulary.token_texts):
            if text and token_id not in vocabulary.eos_token_ids:
                self._free_W[token_id // 32] |= np.uint32(1 << token_id % 32)

    def close(self) -> None:
        self._compiler.close()

    def canonical(self, constraint: Constraint) -> Constraint:
        return self._compiler.canonical(constraint)

    def matcher(
        self, constraint: Constraint | None, output: Sequence[int] = (), *, thinking: ThinkingBudget | None = None
    ) -> Matcher:
        """Returns the matcher of a canonical constraint, a bound on the reasoning, or both, after some output.

        Raises ConstraintError.
        """
        matcher = None if constraint is None else self._constrained(constraint)
        if thinking is not None:
            matcher = ThinkingMatcher(thinking, self._vocabulary.token_texts, matcher)
        assert matcher is not None, "a matcher is for a constraint or a bound"
        for position, token_id in enumerate(output):
            if not matcher.take(token_id):
                raise ConstraintError(f"the output's token {token_id} at position {position} may not come there")
        return matcher

    def _constrained(self, constraint: Constraint) -> Matcher:
        inner = self._inner(constraint)
        if not constraint.after:
            return inner
        return AfterMatcher(FreePart(self._occurrence(constraint.after), self._free_W.view(np.int32), inner))

    def _inner(self, constraint: Constraint) -> LlguidanceMatcher:
        return self._fresh(constraint.SerializeToString(deterministic=True)).copy()

    def _compiled(self, serialized: bytes) -> LlguidanceMatcher:
        constraint = Constraint.FromString(serialized)
        matcher = new_matcher(library_grammar(constraint, self._vocabulary.special_tokens), self._vocabulary)
        if matcher.error:
            raise ConstraintError(f"{constraint.WhichOneof('kind')}: {matcher.error}")
        return matcher
