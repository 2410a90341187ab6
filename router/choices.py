"""One choice of a request: its tokens so far, and their fold into text, stops and a finish."""

from collections.abc import Sequence

from protos.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Finish,
    SamplingParams,
    TokenLogprobs,
)
from protos.scheduler_pb2 import SequenceFinish
from router.detokenizer import IncrementalDetokenizer, TokenTable
from router.errors import Internal
from router.pieces import Piece
from router.stop_strings import StopMatcher


class Choice:
    """The fold of a choice's output tokens. Given the same tokens it says the same text, wherever it runs."""

    __slots__ = (
        "_detokenizer",
        "_has_stop_strings",
        "_matcher",
        "_min_tokens",
        "_stops",
        "_table",
        "_unshown",
        "finish",
        "index",
        "token_ids",
    )

    def __init__(self, index: int, sampling: SamplingParams, eos_token_ids: Sequence[int], table: TokenTable) -> None:
        """sampling: resolved."""
        self.index = index
        # Delivered or about to be.
        self.token_ids: list[int] = []
        # Set once the choice has ended.
        self.finish: Finish | None = None
        self._table = table
        self._detokenizer = IncrementalDetokenizer(table, skip_special_tokens=sampling.skip_special_tokens)
        self._matcher = StopMatcher(sampling.stop, include_in_output=sampling.include_stop_str_in_output)
        self._has_stop_strings = bool(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._stops = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        )
        # What ends the output is no part of its text, unless asked for.
        self._unshown = frozenset[int]() if sampling.include_stop_str_in_output else self._stops

    def advance(
        self,
        first_token: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        ended: SequenceFinish | None = None,
    ) -> Piece | None:
        """Takes tokens that a scheduler sent, and the end of the sequence if it came with them.

        first_token: output position of token_ids[0]; tokens already here are dropped. logprobs: one a token, or none.
        Returns what is new for the client. Sets `finish` at an end, be it the scheduler's or a stop string.
        Raises Internal if tokens are missing in between.
        """
        known = len(self.token_ids)
        if self.finish is not None:
            return None
        if first_token > known:
            raise Internal(f"choice {self.index} misses its output tokens {known} to {first_token - 1}")
        offset = known - first_token
        new = token_ids[offset:] if offset else token_ids
        text = self._fold(new, ended)
        if not new and self.finish is None:
            return None
        # Fewer than came, if a stop string ended it before.
        taken = self.token_ids[known:]
        piece = Piece(
            self.index, known, taken, text, logprobs[offset : offset + len(taken)] if logprobs else (), self.finish
        )
        for entry in piece.logprobs:
            self._fill_token_bytes(entry)
        return piece

    def refold(self, token_ids: Sequence[int], sampling: SamplingParams) -> str:
        """Takes the tokens that a client brings on a resume; returns their text.

        sampling: as at the construction. `finish` is set if they are a complete output already, by the rules that the
        scheduler applies: then nothing is left to compute.
        """
        ended = None
        if token_ids and len(token_ids) >= self._min_tokens and token_ids[-1] in self._stops:
            ended = SequenceFinish(reason=FINISH_REASON_STOP)
            if token_ids[-1] in sampling.stop_token_ids:
                ended.stop_token_id = token_ids[-1]
        elif len(token_ids) >= sampling.max_tokens:
            ended = SequenceFinish(reason=FINISH_REASON_LENGTH)
        return self._fold(token_ids, ended)

    def fill_prompt_token_bytes(self, logprobs: Sequence[TokenLogprobs]) -> None:
        for entry in logprobs:
            self._fill_token_bytes(entry)

    def _fold(self, token_ids: Sequence[int], ended: SequenceFinish | None) -> str:
        parts: list[str] = []
        if not self._has_stop_strings and self._unshown.isdisjoint(token_ids):
            # Nothing in it can end the output or be left out: no token needs a look of its own.
            self.token_ids += token_ids
            parts.append(self._detokenizer.push_all(token_ids))
        else:
            for token_id in token_ids:
                self.token_ids.append(token_id)
                if token_id in self._unshown and len(self.token_ids) >= self._min_tokens:
                    continue
                text = self._detokenizer.push(token_id)
                if text and self._match(text, parts):
                    return "".join(parts)
        if ended is not None:
            tail = self._detokenizer.finish()
            if not (tail and self._match(tail, parts)):
                parts.append(self._matcher.finish())
                self.finish = Finish(reason=ended.reason)
                if ended.HasField("stop_token_id"):
                    self.finish.stop_token_id = ended.stop_token_id
        return "".join(parts)

    def _match(self, text: str, parts: list[str]) -> bool:
        parts.append(self._matcher.push(text, may_stop=len(self.token_ids) >= self._min_tokens))
        if self._matcher.matched is None:
            return False
        self.finish = Finish(reason=FINISH_REASON_STOP, stop_string=self._matcher.matched)
        return True

    def _fill_token_bytes(self, entry: TokenLogprobs) -> None:
        token_bytes = self._table.token_bytes
        entry.chosen.token = token_bytes(entry.chosen.token_id)
        for candidate in entry.top:
            candidate.token = token_bytes(candidate.token_id)
