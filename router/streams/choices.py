"""The choices of a request: each folds its tokens into text, stops and a finish.

A choice can start from tokens it already has: those of a client's resume, or those submitted to another replica.
"""

import asyncio
from collections.abc import Sequence
from itertools import accumulate

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
from router.parsing.parser import OutputParser
from router.text.stop_strings import StopMatcher, StopStrings
from router.text.tokenizer import IncrementalDetokenizer, Tokenizer

# Tokens of a resume that are folded before other work of the event loop has its turn. With 16 stop strings and the
# longest tokens (128 characters) they take 3 ms.
SLICE_TOKENS = 1024
# The same if a parser reads their text: at worst it takes 5 us a character.
_PARSED_SLICE_TOKENS = 256


class Delta:
    """The contents of a Chunk. It grows until it is sent; growing lists costs less than growing messages."""

    __slots__ = ("deltas", "exact", "finish", "first_token", "index", "logprobs", "packed", "size", "text", "token_ids")

    def __init__(
        self,
        index: int,
        first_token: int,
        token_ids: list[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] = (),
        finish: Finish | None = None,
        deltas: list[pb.Delta] | None = None,
    ) -> None:
        """Takes the fields of Chunk. logprobs are copied."""
        self.index = index
        self.first_token = first_token
        self.token_ids = token_ids
        self.text = text
        self.logprobs: list[TokenLogprobs] = []
        # Chunks of logprobs that follow those, serialized.
        self.packed: list[bytes] = []
        self.finish = finish
        self.deltas = deltas or []
        self.exact = True
        # Size of its message in bytes, give or take a few.
        self.size = 10 + 3 * len(token_ids) + (len(text) if text.isascii() else len(text.encode()))
        for entry in logprobs:
            copied = TokenLogprobs()
            copied.CopyFrom(entry)
            self.logprobs.append(copied)
            self.size += entry.ByteSize()
        for delta in self.deltas:
            self.size += delta.ByteSize() + 2

    def pack(self) -> None:
        """Keeps logprobs as bytes until they are sent. A message of its own for each token takes ten times as much
        memory, which counts where nobody may read for minutes."""
        if self.logprobs:
            self.packed.append(pb.Chunk(logprobs=self.logprobs).SerializeToString())
            self.logprobs = []

    def join(self, later: "Delta") -> None:
        """Appends the delta that follows it, of the same choice and equally exact."""
        self.token_ids += later.token_ids
        self.text += later.text
        assert not (self.packed and later.logprobs), "logprobs would change their order"
        self.logprobs += later.logprobs
        self.packed += later.packed
        self.deltas += later.deltas
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
        for packed in self.packed:
            # Adds to the list.
            chunk.MergeFromString(packed)
        if self.deltas:
            chunk.deltas.extend(self.deltas)
        if self.finish is not None:
            chunk.finish.CopyFrom(self.finish)
        return message


class Choice:
    """Folds a choice's output tokens. The same tokens give the same text, wherever it runs."""

    __slots__ = (
        "_detokenizer",
        "_has_stop_strings",
        "_matcher",
        "_min_tokens",
        "_parser",
        "_stops",
        "_table",
        "_unshown",
        "finish",
        "index",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        sampling: SamplingParams,
        eos_token_ids: Sequence[int],
        table: Tokenizer,
        stop_strings: StopStrings,
        parser: OutputParser | None = None,
    ) -> None:
        """sampling: resolved. stop_strings: the sampling's. parser: a new one, if the output is parsed."""
        self.index = index
        # Tokens delivered or about to be.
        self.token_ids: list[int] = []
        # Set once the choice has ended.
        self.finish: Finish | None = None
        self._parser = parser
        self._table = table
        self._detokenizer = IncrementalDetokenizer(table, skip_special_tokens=sampling.skip_special_tokens)
        self._matcher = StopMatcher(stop_strings, include_in_output=sampling.include_stop_str_in_output)
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
        Returns what is new for the client. Sets `finish` if the scheduler or a stop string ended the choice.
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
        # Fewer than came if a stop string ended the choice early.
        taken = self.token_ids[known:]
        self._count_reasoning(taken)
        delta = Delta(
            self.index,
            known,
            taken,
            text,
            logprobs[offset : offset + len(taken)] if logprobs else (),
            self.finish,
            self.parse(text) + self.end_parsing(),
        )
        for entry in delta.logprobs:
            self._fill_token_bytes(entry)
        return delta

    @property
    def is_parsed(self) -> bool:
        return self._parser is not None

    @property
    def num_malformed_calls(self) -> int:
        return 0 if self._parser is None else self._parser.num_malformed

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning, if the output is parsed."""
        return 0 if self._parser is None or self._parser.reasoning is None else self._parser.reasoning.num_tokens

    def parse(self, text: str) -> list[pb.Delta]:
        """Returns what the parser makes of text that `bring` or `end_brought` returned; nothing without a parser."""
        return [] if self._parser is None else self._parser.push(text)

    def end_parsing(self) -> list[pb.Delta]:
        """Returns what the parser makes of the end of the text. Completes `finish`, if the choice has ended."""
        if self._parser is None or self.finish is None:
            return []
        deltas = self._parser.finish()
        self.finish.has_tool_calls = self.finish.reason == FINISH_REASON_STOP and self._parser.num_calls > 0
        return deltas

    def bring(self, token_ids: Sequence[int]) -> str:
        """Takes tokens that a client brings on a resume, in order, all of them or a slice; returns their text.

        Sets `finish` if a stop string ends the output in them.
        """
        known = len(self.token_ids)
        text = self._fold(token_ids, None)
        self._count_reasoning(self.token_ids[known:])
        return text

    def end_brought(self, sampling: SamplingParams) -> str:
        """Takes the end of the tokens brought; returns the text that became certain with it.

        sampling: the constructor's. Sets `finish` if they are a complete output already, by the scheduler's rules: then
        nothing is left to compute.
        """
        token_ids, ended = self.token_ids, None
        if self.finish is not None:
            return ""
        if token_ids and len(token_ids) >= self._min_tokens and token_ids[-1] in self._stops:
            ended = SequenceFinish(reason=FINISH_REASON_STOP)
            if token_ids[-1] in sampling.stop_token_ids:
                ended.stop_token_id = token_ids[-1]
        elif len(token_ids) >= sampling.max_tokens:
            ended = SequenceFinish(reason=FINISH_REASON_LENGTH)
        return self._fold((), ended)

    def fill_prompt_token_bytes(self, logprobs: Sequence[TokenLogprobs]) -> None:
        for entry in logprobs:
            self._fill_token_bytes(entry)

    def _count_reasoning(self, token_ids: Sequence[int]) -> None:
        reasoning = None if self._parser is None else self._parser.reasoning
        if reasoning is None or reasoning.is_over:
            return
        for token_id in token_ids:
            reasoning.take(self._table.token_bytes(token_id))

    def _fold(self, token_ids: Sequence[int], ended: SequenceFinish | None) -> str:
        parts: list[str] = []
        if not self._has_stop_strings and self._unshown.isdisjoint(token_ids):
            # No token can end the output or be left out of the text, so none is checked by itself.
            self.token_ids += token_ids
            parts.append(self._detokenizer.push_all(token_ids))
        else:
            # Those before the token with which min_tokens is reached end nothing.
            num_early = min(max(self._min_tokens - 1 - len(self.token_ids), 0), len(token_ids))
            if self._fold_alike(token_ids[:num_early], parts) or self._fold_alike(token_ids[num_early:], parts):
                return "".join(parts)
        if ended is not None:
            tail = self._detokenizer.finish()
            if not (tail and self._match(tail, parts)):
                parts.append(self._matcher.finish())
                self.finish = Finish(reason=ended.reason)
                if ended.HasField("stop_token_id"):
                    self.finish.stop_token_id = ended.stop_token_id
        return "".join(parts)

    def _fold_alike(self, token_ids: Sequence[int], parts: list[str]) -> bool:
        """Folds tokens that may all end the output, or none of them. Returns True if a stop string has ended it; later
        tokens are not taken then."""
        if not token_ids:
            return False
        known = len(self.token_ids)
        self.token_ids += token_ids
        hidden = self._unshown if len(self.token_ids) >= self._min_tokens else ()
        push = self._detokenizer.push
        texts = ["" if token_id in hidden else push(token_id) for token_id in token_ids]
        text = "".join(texts)
        if not text or not self._match(text, parts):
            return False
        # The token with which the stop string was complete is the last one.
        num_taken = 1 + sum(end < self._matcher.match_end for end in accumulate(map(len, texts)))
        del self.token_ids[known + num_taken :]
        return True

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


def new_choices(
    sampling: SamplingParams, eos_token_ids: Sequence[int], table: Tokenizer, parsers: Sequence[OutputParser] = ()
) -> list[Choice]:
    """The choices of a request, by index. sampling: resolved. parsers: one for each choice, or none."""
    stop_strings = StopStrings(sampling.stop)
    return [
        Choice(i, sampling, eos_token_ids, table, stop_strings, parsers[i] if parsers else None)
        for i in range(sampling.n)
    ]


async def refold(
    choices: Sequence[Choice], resume: pb.Resume, sampling: pb.SamplingParams, turn: asyncio.Lock
) -> list[pb.Chunk]:
    """Folds the tokens that the client holds into its choices; returns the text and finishes that it lacks.

    Yields to the event loop after each slice of SLICE_TOKENS. turn: shared by all resumes, which fold a slice each in
    turn, so that the loop never waits for more than one. A resume of a slice or less waits for no turn.
    choices: new ones, by index. sampling: that of their construction. Raises InvalidRequest if the resume contradicts
    itself.
    """
    chunks: list[pb.Chunk] = []
    is_small = sum(len(brought.output_token_ids) for brought in resume.choices) <= SLICE_TOKENS
    for brought in resume.choices:
        choice = choices[brought.index]
        text = _BroughtText(choice, brought.text_bytes_delivered)
        slice_tokens = _PARSED_SLICE_TOKENS if choice.is_parsed else SLICE_TOKENS
        for start in range(0, len(brought.output_token_ids), slice_tokens):
            token_ids = brought.output_token_ids[start : start + slice_tokens]
            if is_small:
                text.add(choice.bring(token_ids))
                continue
            async with turn:
                text.add(choice.bring(token_ids))
                await asyncio.sleep(0)
            if choice.finish is not None:
                break
        text.add(choice.end_brought(sampling))
        text.end()
        if (chunk := _lacking(choice, brought, text)) is not None:
            chunks.append(chunk)
    return chunks


class _BroughtText:
    """The text of the tokens that a client brings, and what its parser makes of the part that the client lacks."""

    __slots__ = ("_choice", "_num_delivered", "deltas", "parts", "size")

    def __init__(self, choice: Choice, num_delivered: int) -> None:
        """num_delivered: bytes that the client has."""
        self._choice = choice
        self._num_delivered = num_delivered
        self.parts: list[bytes] = []
        self.size = 0
        self.deltas: list[pb.Delta] = []

    def add(self, text: str) -> None:
        part = text.encode()
        num_known = max(0, min(len(part), self._num_delivered - self.size))
        self.parts.append(part)
        self.size += len(part)
        if self._choice.is_parsed:
            # The client has the deltas of what it knows. A cut inside of a character is refused by `_lacking`.
            self._choice.parse(part[:num_known].decode(errors="replace"))
            self.deltas += self._choice.parse(part[num_known:].decode(errors="replace"))

    def end(self) -> None:
        self.deltas += self._choice.end_parsing()


def _lacking(choice: Choice, brought: pb.ResumeChoice, text: _BroughtText) -> pb.Chunk | None:
    """Returns the text and finish that a client lacks of a choice; None if it lacks nothing. text: of the tokens that
    it holds. Raises InvalidRequest."""
    if brought.finished:
        choice.finish = choice.finish or pb.Finish(reason=pb.FINISH_REASON_STOP)
        return None
    delivered = brought.text_bytes_delivered
    field = f"resume.choices of index {brought.index}: text_bytes_delivered={delivered}"
    if delivered > text.size:
        raise InvalidRequest(f"{field}, but its {len(brought.output_token_ids)} tokens give {text.size} bytes of text")
    try:
        rest = b"".join(text.parts)[delivered:].decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{field} is inside of a character: count the UTF-8 bytes of whole ones") from None
    if not rest and choice.finish is None:
        return None
    return pb.Chunk(
        index=brought.index, first_token=len(choice.token_ids), text=rest, finish=choice.finish, deltas=text.deltas
    )
