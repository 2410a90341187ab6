"""The choices of a request: each folds its tokens into text, stops and a finish.

A choice can start from tokens it already has: those of a client's resume, or those that a replica gets on a submission.
"""

from collections.abc import Sequence

from protos import inference_pb2 as pb
from protos.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Finish,
    GenerateResponse,
    SamplingParams,
    TokenLogprobs,
)
from protos.scheduler_pb2 import SequenceFinish
from router.errors import Internal, InvalidRequest
from router.text.stop_strings import StopMatcher
from router.text.tokenizer import IncrementalDetokenizer, TokenTable


class Delta:
    """The contents of a Chunk. It grows until it is sent, which costs less in lists than in messages."""

    __slots__ = ("exact", "finish", "first_token", "index", "logprobs", "size", "text", "token_ids")

    def __init__(
        self,
        index: int,
        first_token: int,
        token_ids: list[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] = (),
        finish: Finish | None = None,
    ) -> None:
        """As the fields of Chunk. logprobs are copied."""
        self.index = index
        self.first_token = first_token
        self.token_ids = token_ids
        self.text = text
        self.logprobs: list[TokenLogprobs] = []
        self.finish = finish
        self.exact = True
        # Of its message, in bytes, to a few bytes.
        self.size = 10 + 3 * len(token_ids) + (len(text) if text.isascii() else len(text.encode()))
        for entry in logprobs:
            copied = TokenLogprobs()
            copied.CopyFrom(entry)
            self.logprobs.append(copied)
            self.size += entry.ByteSize()

    def join(self, later: "Delta") -> None:
        """Takes in the one that follows it, of the same choice and equally exact."""
        self.token_ids += later.token_ids
        self.text += later.text
        self.logprobs += later.logprobs
        self.finish = later.finish
        self.size += later.size

    def message(self) -> GenerateResponse:
        # Filled in place: a Chunk given to the constructor would be copied.
        message = GenerateResponse()
        chunk = message.chunk
        if self.index:
            chunk.index = self.index
        chunk.first_token = self.first_token
        chunk.token_ids.extend(self.token_ids)
        chunk.text = self.text
        chunk.exact = self.exact
        if self.logprobs:
            chunk.logprobs.extend(self.logprobs)
        if self.finish is not None:
            chunk.finish.CopyFrom(self.finish)
        return message


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
    ) -> Delta | None:
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
        delta = Delta(
            self.index, known, taken, text, logprobs[offset : offset + len(taken)] if logprobs else (), self.finish
        )
        for entry in delta.logprobs:
            self._fill_token_bytes(entry)
        return delta

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


def refold(choices: Sequence[Choice], resume: pb.Resume, sampling: pb.SamplingParams) -> list[pb.Chunk]:
    """Folds the tokens that the client holds into its choices; returns what it lacks of their text and ends.

    choices: new ones, by index. sampling: as they were made with. Raises InvalidRequest if the resume contradicts
    itself.
    """
    chunks: list[pb.Chunk] = []
    for brought in resume.choices:
        choice = choices[brought.index]
        text = choice.refold(brought.output_token_ids, sampling).encode()
        if brought.finished:
            choice.finish = choice.finish or pb.Finish(reason=pb.FINISH_REASON_STOP)
            continue
        delivered = brought.text_bytes_delivered
        field = f"resume.choices of index {brought.index}: text_bytes_delivered={delivered}"
        if delivered > len(text):
            raise InvalidRequest(
                f"{field}, but its {len(brought.output_token_ids)} tokens give {len(text)} bytes of text"
            )
        try:
            rest = text[delivered:].decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"{field} is inside of a character: count whole ones, in UTF-8") from None
        if rest or choice.finish is not None:
            chunks.append(
                pb.Chunk(index=brought.index, first_token=len(choice.token_ids), text=rest, finish=choice.finish)
            )
    return chunks
