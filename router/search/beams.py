"""The beam search itself: a pure function of the logprobs that replicas return.

It finds what `generate(num_beams=width, num_return_sequences=n, early_stopping=False)` of transformers finds:

- Each step continues every live beam by every token. Of all these outputs, those among the `width` best that end are
  finished; the `width` best of the others are the next beams.
- A finished output's score is its logprob / tokens ** length_penalty. The `width` best ones are kept.
- The search ends at max_tokens, where the `width` best outputs are finished as well, or once there are `width` finished
  ones and the best beam would score no better, if it were finished now, than the last of them.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from protos.inference_pb2 import TokenLogprob, TokenLogprobs


class _LogprobChain(NamedTuple):
    """The logprobs of a beam's last token, and those of the beam that it continues."""

    before: "_LogprobChain | None"
    logprobs: TokenLogprobs


class Beam:
    """An output so far. logprob: the sum of its tokens'."""

    __slots__ = ("_chain", "logprob", "token_ids")

    def __init__(self, token_ids: list[int], logprob: float, chain: _LogprobChain | None = None) -> None:
        self.token_ids = token_ids
        self.logprob = logprob
        self._chain = chain

    def continued(self, token: TokenLogprob, logprob: float, logprobs: TokenLogprobs | None) -> "Beam":
        """Returns the beam with one more token. logprobs: the token's, if they are kept."""
        chain = None if logprobs is None else _LogprobChain(self._chain, logprobs)
        return Beam([*self.token_ids, token.token_id], logprob, chain)

    def logprobs(self) -> list[TokenLogprobs]:
        """Those of all its tokens; none if they are not kept."""
        found, chain = [], self._chain
        while chain is not None:
            found.append(chain.logprobs)
            chain = chain.before
        return found[::-1]


class Finished(NamedTuple):
    score: float
    beam: Beam


class BeamSearch:
    def __init__(
        self,
        *,
        width: int,
        length_penalty: float,
        max_tokens: int,
        min_tokens: int = 0,
        end_ids: Collection[int] = (),
        num_logprobs: int | None = None,
    ) -> None:
        """end_ids: tokens that end an output, once it has min_tokens. num_logprobs: likely tokens whose logprobs
        are kept beside each token's; None: none are kept."""
        self.width = width
        # Beams to continue; none once the search has ended.
        self.live = [Beam([], 0.0)]
        # The best first.
        self.finished: list[Finished] = []
        # Steps so far, which are the tokens of each live beam.
        self.num_steps = 0
        # Tokens of each beam whose logprobs it needs. All end_ids may be among the best ones of a beam, and `width`
        # others must be known, for all of the next beams may continue this one.
        self.num_needed = width + len(end_ids)
        # More, if more are to be shown.
        self.num_asked = max(self.num_needed, num_logprobs or 0)
        self._length_penalty = length_penalty
        self._max_tokens, self._min_tokens = max_tokens, min_tokens
        self._end_ids = frozenset(end_ids)
        self._num_logprobs = num_logprobs

    @property
    def done(self) -> bool:
        return not self.live

    def advance(self, answers: Sequence[Sequence[TokenLogprob]]) -> None:
        """Takes a step. answers: for each live beam, in order, at least the num_needed most likely tokens that continue
        it, the best first."""
        self.num_steps += 1
        is_last = self.num_steps == self._max_tokens
        may_end = self.num_steps > self._min_tokens
        candidates = [
            (beam.logprob + token.logprob, beam, place, tokens)
            for beam, tokens in zip(self.live, answers, strict=True)
            for place, token in enumerate(tokens)
            if may_end or token.token_id not in self._end_ids
        ]
        # Stable, so that ties are decided alike each time.
        candidates.sort(key=lambda candidate: -candidate[0])
        live: list[Beam] = []
        for index, (logprob, beam, place, tokens) in enumerate(candidates):
            if is_last or tokens[place].token_id in self._end_ids:
                if index < self.width:
                    longer = self._continued(beam, logprob, place, tokens)
                    self.finished.append(Finished(self._score(logprob), longer))
            elif len(live) < self.width:
                live.append(self._continued(beam, logprob, place, tokens))
            if index >= self.width and (is_last or len(live) == self.width):
                break
        self.finished.sort(key=lambda each: -each.score)
        del self.finished[self.width :]
        is_full = len(self.finished) == self.width
        self.live = [] if is_full and live and self._score(live[0].logprob) <= self.finished[-1].score else live

    def _score(self, logprob: float) -> float:
        return logprob / self.num_steps**self._length_penalty

    def _continued(self, beam: Beam, logprob: float, place: int, tokens: Sequence[TokenLogprob]) -> Beam:
        token = tokens[place]
        if self._num_logprobs is None:
            return beam.continued(token, logprob, None)
        return beam.continued(token, logprob, TokenLogprobs(chosen=token, top=tokens[: self._num_logprobs]))
