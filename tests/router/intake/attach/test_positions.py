"""The events a client lacks, by what it says to hold: whole chunks, no more than were sent, no less than is kept."""

from dataclasses import replace

import pytest

from protos import inference_pb2 as pb
from router.accepted import Request
from router.errors import InvalidRequest, NotKept
from router.intake.attach.positions import Kept

FINISH = pb.Finish(reason=pb.FINISH_REASON_STOP)


def _chunk(index: int, first: int, token_ids: list[int], text: str, finish: pb.Finish | None = None) -> pb.Chunk:
    return pb.Chunk(index=index, first_token=first, token_ids=token_ids, text=text, finish=finish)


CHUNKS = [
    _chunk(0, 0, [1, 2], "ab"),
    _chunk(1, 0, [7], "ö"),
    _chunk(0, 2, [3], ""),
    _chunk(0, 3, [], "c", FINISH),
    _chunk(1, 1, [8], "x", FINISH),
]
STARTED = pb.GenerateResponse(started=pb.Started(request_id="a"))
FRAMES = [pb.PromptLogprobs(first_position=first, logprobs=[pb.TokenLogprobs()] * 3) for first in (1, 4)]
EVENTS = [
    STARTED,
    *(pb.GenerateResponse(prompt_logprobs=frame) for frame in FRAMES),
    *(pb.GenerateResponse(chunk=chunk) for chunk in CHUNKS),
    pb.GenerateResponse(finished=pb.Finished()),
]


def _request(resume: pb.Resume | None = None) -> Request:
    sampling = pb.SamplingParams(n=2)
    return Request(
        request_id="a", scoped_id="a", model="m", prompt_token_ids=[1], sampling=sampling, arrival=0, resume=resume
    )


def _kept(resume: pb.Resume | None = None) -> Kept:
    kept = Kept(_request(resume))
    kept.take(EVENTS[:1])
    return kept


def _held(*choices: pb.AttachChoice, logprobs_end: int = 7) -> pb.AttachRequest:
    return pb.AttachRequest(request_id="a", choices=choices, prompt_logprobs_end=logprobs_end)


def _held_after(num_chunks: int) -> pb.AttachRequest:
    """Returns what a client holds after so many chunks."""
    choices = [pb.AttachChoice(index=index) for index in range(2)]
    for chunk in CHUNKS[:num_chunks]:
        choice = choices[chunk.index]
        choice.num_tokens += len(chunk.token_ids)
        choice.text_bytes += len(chunk.text.encode())
        choice.finished = choice.finished or chunk.HasField("finish")
    return _held(*choices)


@pytest.mark.parametrize("num_chunks", range(len(CHUNKS) + 1))
def test_started_and_the_chunks_that_are_lacking_come_in_order(num_chunks: int) -> None:
    lacking = _kept().lacking(_held_after(num_chunks), EVENTS)
    assert lacking[0] == STARTED
    assert [event.chunk for event in lacking[1:-1]] == CHUNKS[num_chunks:]
    assert lacking[-1].HasField("finished")


def test_who_holds_nothing_gets_everything() -> None:
    assert _kept().lacking(pb.AttachRequest(request_id="a"), EVENTS) == EVENTS


def test_prompt_logprobs_go_on_behind_the_position_held() -> None:
    frame = _kept().lacking(_held(logprobs_end=5), EVENTS)[1].prompt_logprobs
    assert (frame.first_position, len(frame.logprobs)) == (5, 2)
    with pytest.raises(InvalidRequest, match="prompt_logprobs_end=8, but only those before 7"):
        _kept().lacking(_held(logprobs_end=8), EVENTS)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (pb.AttachChoice(index=0, num_tokens=4, text_bytes=3, finished=True), "4 tokens, .* only 3 tokens"),
        (pb.AttachChoice(index=0, num_tokens=1, text_bytes=1), "inside of the chunk from 0 tokens.* to 2 tokens"),
        (pb.AttachChoice(index=0, num_tokens=2, text_bytes=1), "inside of the chunk"),
        (pb.AttachChoice(index=1, num_tokens=2, text_bytes=3), "inside of the chunk .* and the finish"),
        (pb.AttachChoice(index=2), "this request has 2"),
    ],
)
def test_what_no_client_can_hold_is_refused(choice: pb.AttachChoice, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"choices of index {choice.index}: .*{message}"):
        _kept().lacking(_held(choice), EVENTS)


def test_a_choice_is_named_once() -> None:
    twice = pb.AttachChoice(index=1)
    with pytest.raises(InvalidRequest, match="name each choice once"):
        _kept().lacking(_held(twice, twice), EVENTS)


def test_what_is_not_kept_any_more_cannot_be_lacking() -> None:
    kept, first = _kept(), pb.AttachChoice(index=0, num_tokens=2, text_bytes=2)
    for event in EVENTS[:4]:
        kept.drop(event)
    with pytest.raises(NotKept, match=r"choices of index 0: 0 tokens.* only what follows 2 tokens, 2 bytes"):
        kept.lacking(_held(), EVENTS[4:])
    with pytest.raises(NotKept, match="prompt_logprobs_end=1: prompt logprobs before 7"):
        kept.lacking(_held(first, logprobs_end=1), EVENTS[4:])
    lacking = kept.lacking(_held(first), EVENTS[4:])
    assert [event.chunk for event in lacking[1:-1]] == CHUNKS[1:]


def test_a_resumed_stream_begins_behind_what_its_client_brought() -> None:
    brought = pb.ResumeChoice(index=0, output_token_ids=[9, 9], text_bytes_delivered=5)
    kept = _kept(pb.Resume(attempt=1, choices=[brought]))
    with pytest.raises(NotKept):
        kept.lacking(_held(), EVENTS)
    lacking = kept.lacking(_held(pb.AttachChoice(index=0, num_tokens=5, text_bytes=8, finished=True)), EVENTS)
    assert [event.chunk for event in lacking[1:-1]] == [chunk for chunk in CHUNKS if chunk.index == 1]


def test_prompt_logprobs_that_a_resume_brought_are_held_and_not_sent_again() -> None:
    brought = pb.Resume(prompt_logprobs_delivered=True)
    request = replace(_request(brought), prompt_token_ids=[1] * 7)
    kept, events = Kept(request), [EVENTS[0], *EVENTS[3:]]
    kept.take(events[:1])
    assert kept.lacking(_held(), events) == events
    with pytest.raises(NotKept, match="prompt_logprobs_end=4"):
        kept.lacking(_held(logprobs_end=4), events)
    with pytest.raises(InvalidRequest, match="prompt_logprobs_end=8"):
        kept.lacking(_held(logprobs_end=8), events)
