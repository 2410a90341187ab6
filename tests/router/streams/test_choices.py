"""Folding tokens into text and ends: in one go, in slices and token by token it is the same; long resumes let others
have their turn."""

import asyncio
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from protos import inference_pb2 as pb
from router.streams.choices import SLICE_TOKENS, Choice, new_choices, refold
from router.text.tokenizer import IncrementalDetokenizer, Tokenizer

# Tokens of one to three characters, of parts of a character, and one without text.
_TABLE = (b"a", b"b", b"ab", b"ba", b"aab", b"bb", "é".encode()[:1], "é".encode()[1:], b"")
_EOS, _STOP_TOKEN = 5, 4


class _Tokens(Tokenizer):
    """A table of few tokens, so that their texts often meet stop strings."""

    def __init__(self) -> None:
        self.special_ids = frozenset({1})

    def token_bytes(self, token_id: int) -> bytes:
        return _TABLE[token_id]

    def token_text(self, token_id: int) -> str | None:
        try:
            return _TABLE[token_id].decode()
        except UnicodeDecodeError:
            return None


class _ByCharacter:
    """Looks for stop strings as their definition says, at the end of the text after each character."""

    def __init__(self, stop: list[str], include: bool) -> None:
        self._stop, self._include = sorted(set(stop), key=len, reverse=True), include
        self._text, self._num_shown = "", 0
        self.matched: str | None = None

    def push(self, text: str, may_stop: bool) -> str:
        for char in text:
            self._text += char
            found = next((stop for stop in self._stop if self._text.endswith(stop)), None)
            if found is not None and may_stop:
                self.matched = found
                return self._shown(0 if self._include else len(found))
        return self._shown(max((self._begun(stop) for stop in self._stop), default=0))

    def finish(self) -> str:
        return self._shown(0)

    def _begun(self, stop: str) -> int:
        return next(size for size in range(len(stop) - 1, -1, -1) if self._text.endswith(stop[:size]))

    def _shown(self, num_held: int) -> str:
        end = len(self._text) - num_held
        shown, self._num_shown = self._text[self._num_shown : end], end
        return shown


def _token_by_token(token_ids: list[int], sampling: pb.SamplingParams) -> tuple[list[int], str, pb.Finish | None]:
    """The tokens, text and end of a choice, folded one token at a time as routers did at first."""
    stops = {*sampling.stop_token_ids, _EOS}
    unshown = set() if sampling.include_stop_str_in_output else stops
    detokenizer = IncrementalDetokenizer(_Tokens(), skip_special_tokens=sampling.skip_special_tokens)
    matcher = _ByCharacter(list(sampling.stop), sampling.include_stop_str_in_output)
    taken: list[int] = []
    shown = ""
    for token_id in token_ids:
        taken.append(token_id)
        may_stop = len(taken) >= sampling.min_tokens
        if token_id in unshown and may_stop:
            continue
        shown += matcher.push(detokenizer.push(token_id), may_stop)
        if matcher.matched is not None:
            return taken, shown, pb.Finish(reason=pb.FINISH_REASON_STOP, stop_string=matcher.matched)
    finish = None
    if taken and len(taken) >= sampling.min_tokens and taken[-1] in stops:
        finish = pb.Finish(reason=pb.FINISH_REASON_STOP)
        if taken[-1] in sampling.stop_token_ids:
            finish.stop_token_id = taken[-1]
    elif len(taken) >= sampling.max_tokens:
        finish = pb.Finish(reason=pb.FINISH_REASON_LENGTH)
    if finish is not None:
        shown += matcher.push(detokenizer.finish(), len(taken) >= sampling.min_tokens)
        if matcher.matched is not None:
            return taken, shown, pb.Finish(reason=pb.FINISH_REASON_STOP, stop_string=matcher.matched)
        shown += matcher.finish()
    return taken, shown, finish


def _choice(sampling: pb.SamplingParams) -> Choice:
    return new_choices(sampling, [_EOS], _Tokens())[0]


@settings(max_examples=500)
@given(
    st.lists(st.sampled_from(range(len(_TABLE))), max_size=40),
    st.lists(st.text(alphabet="abé\ufffd", min_size=1, max_size=6), max_size=3),
    st.integers(0, 12),
    st.booleans(),
    st.booleans(),
    st.integers(1, 40),
)
def test_slices_give_what_token_by_token_gives(
    token_ids: list[int], stop: list[str], min_tokens: int, include: bool, skip: bool, slice_tokens: int
) -> None:
    sampling = pb.SamplingParams(
        n=1,
        stop=stop,
        min_tokens=min_tokens,
        max_tokens=30,
        stop_token_ids=[_STOP_TOKEN],
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
    )
    token_ids = token_ids[: sampling.max_tokens]
    choice, text = _choice(sampling), ""
    for start in range(0, len(token_ids), slice_tokens):
        text += choice.bring(token_ids[start : start + slice_tokens])
        if choice.finish is not None:
            break
    text += choice.end_brought(sampling)
    assert (choice.token_ids, text, choice.finish) == _token_by_token(token_ids, sampling)


async def test_other_work_has_its_turn_between_the_slices_of_a_resume() -> None:
    num_slices = 50
    sampling = pb.SamplingParams(n=1, stop=["never"], max_tokens=10**6)
    brought = pb.ResumeChoice(index=0, output_token_ids=[0] * (num_slices * SLICE_TOKENS), text_bytes_delivered=0)
    resume, turn = pb.Resume(choices=[brought]), asyncio.Lock()
    other_turns = 0

    async def other_work() -> None:
        nonlocal other_turns
        while True:
            await asyncio.sleep(0)
            other_turns += 1

    other = asyncio.create_task(other_work())
    folding = [asyncio.create_task(refold([_choice(sampling)], resume, sampling, turn)) for _ in range(2)]
    (chunks, _) = await asyncio.gather(*folding)
    other.cancel()
    assert chunks[0].text == "a" * (num_slices * SLICE_TOKENS)
    # Two resumes together: a slice of one of them between two turns.
    assert other_turns >= 2 * num_slices


async def test_the_worst_resume_holds_the_loop_for_a_fraction_of_what_it_did() -> None:
    """64 choices of 420 tokens of 128 characters under 16 stop strings of 1,000: 4.0 to 9.4 s in one go before."""
    stop = [f"{'a' * 900}{number:0100}" for number in range(16)]
    sampling = pb.SamplingParams(n=64, stop=stop, max_tokens=420)

    class Long(_Tokens):
        def token_bytes(self, token_id: int) -> bytes:
            return b"a" * 128

    choices = new_choices(sampling, [_EOS], Long())
    resume = pb.Resume(choices=[pb.ResumeChoice(index=i, output_token_ids=[0] * 420) for i in range(64)])
    largest_gap, last = 0.0, time.monotonic()

    async def tick() -> None:
        nonlocal largest_gap, last
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            largest_gap, last = max(largest_gap, now - last), now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    last = time.monotonic()
    chunks = await refold(choices, resume, sampling, asyncio.Lock())
    ticking.cancel()
    assert [len(chunk.text) for chunk in chunks] == [420 * 128] * 64
    assert largest_gap < 0.5
