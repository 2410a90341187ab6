"""The client's state machine: duplicates are dropped, gaps are errors, and a resume states exactly what is held."""

import pytest

from octavo.client.assembly import Assembly
from octavo.client.errors import ProtocolError
from octavo.client.results import Delta, Finished, FinishReason, PromptScored, Started
from protos import inference_pb2 as pb

PROMPT = [5, 6, 7]


def start(n: int = 1, prompt_logprobs: int | None = None) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        started=pb.Started(
            request_id="r",
            seed=9,
            prompt_token_ids=PROMPT,
            model="m",
            fingerprint="f",
            sampling=pb.SamplingParams(seed=9, n=n, max_tokens=4, prompt_logprobs=prompt_logprobs),
        )
    )


def chunk(first: int, ids: list[int], text: str = "", index: int = 0, finish: pb.Finish | None = None):
    return pb.GenerateResponse(
        chunk=pb.Chunk(index=index, first_token=first, token_ids=ids, text=text, exact=True, finish=finish)
    )


def finished() -> pb.GenerateResponse:
    return pb.GenerateResponse(
        finished=pb.Finished(usage=pb.Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=2))
    )


LENGTH = pb.Finish(reason=pb.FINISH_REASON_LENGTH)


def assembly(*messages: pb.GenerateResponse) -> Assembly:
    made = Assembly(pb.GenerateRequest(request_id="r", prompt="hi", priority=3, cache_salt="s"))
    for message in messages:
        made.accept(message)
    return made


def test_a_stream_becomes_typed_events_and_one_result() -> None:
    made = assembly()
    events = [made.accept(m) for m in (start(), chunk(0, [1], "a"), chunk(1, [2], "b", finish=LENGTH), finished())]
    assert [type(e) for e in events] == [Started, Delta, Delta, Finished]
    result = made.generation()
    assert (result.text, result.choices[0].token_ids, result.seed) == ("ab", (1, 2), 9)
    assert result.choices[0].finish_reason is FinishReason.LENGTH
    assert result.usage is not None
    assert result.usage.cached_tokens == 1
    assert made.finished


def test_a_duplicate_chunk_adds_nothing() -> None:
    made = assembly(start(), chunk(0, [1, 2], "ab"), chunk(2, [3], "c"))
    assert made.accept(chunk(0, [1, 2], "ab")) is None
    assert made.accept(chunk(2, [3], "c")) is None
    assert made.generation().choices[0].token_ids == (1, 2, 3)
    assert made.generation().text == "abc"


def test_a_duplicate_of_the_last_chunk_adds_nothing() -> None:
    last = chunk(1, [], "tail", finish=LENGTH)
    made = assembly(start(), chunk(0, [1], "a"), last)
    assert made.accept(last) is None
    assert made.generation().text == "atail"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (chunk(3, [4]), "tokens 2 to 2 are missing"),
        (chunk(1, [2, 3]), "reaches past the 2 held"),
        (chunk(0, [1], index=1), "n is 1"),
        (finished(), r"before its choices \[0\]"),
        (pb.GenerateResponse(), "no event"),
        (chunk(2, [3], finish=pb.Finish()), "unknown finish reason"),
        (
            pb.GenerateResponse(started=pb.Started(request_id="r", seed=10, prompt_token_ids=PROMPT)),
            "another seed",
        ),
        (pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(first_position=2)), "positions 1 to 1 are missing"),
    ],
)
def test_what_breaks_the_contract_is_an_error(message: pb.GenerateResponse, words: str) -> None:
    made = assembly(start(), chunk(0, [1, 2], "ab"))
    with pytest.raises(ProtocolError, match=words):
        made.accept(message)


def test_a_stream_must_begin_with_started() -> None:
    with pytest.raises(ProtocolError, match="began with chunk"):
        assembly().accept(chunk(0, [1]))


def test_before_started_a_retry_is_the_same_request() -> None:
    made = assembly()
    assert made.next_call() == made.next_call()
    assert not made.next_call().HasField("resume")


def test_a_resume_carries_all_that_is_held() -> None:
    done = chunk(0, [8], "é", index=1, finish=LENGTH)
    made = assembly(start(n=3), chunk(0, [1, 2], "aü"), done)
    made.next_call()
    again = made.next_call()
    assert again.resume.attempt == 2, "each call is a new attempt: the lost one may still be live"
    assert again.WhichOneof("input") is None
    assert (again.request_id, again.priority, again.cache_salt, again.model) == ("r", 3, "s", "m")
    assert again.sampling.seed == 9
    assert list(again.resume.prompt_token_ids) == PROMPT
    assert again.resume.fingerprint == "f"
    first, second = again.resume.choices
    assert (list(first.output_token_ids), first.text_bytes_delivered, first.finished) == ([1, 2], 3, False)
    assert (second.index, second.text_bytes_delivered, second.finished) == (1, 2, True)


def test_a_resume_of_a_parsed_output_brings_the_tools_again() -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")], tools=[pb.Tool(name="f")])
    made = Assembly(pb.GenerateRequest(request_id="r", chat=chat, parse_output=True))
    made.accept(start())
    assert made.next_call().chat == pb.ChatPrompt(tools=chat.tools)
    assert chat.messages


def test_started_of_a_resume_is_no_second_event() -> None:
    made = assembly(start(), chunk(0, [1], "a"))
    made.next_call()
    assert made.accept(start()) is None
    assert made.accept(chunk(1, [2], "b")) is not None
    assert made.generation().num_resumes == 1


def test_prompt_logprobs_are_joined_and_reported_as_delivered() -> None:
    def frame(first: int, ids: list[int]) -> pb.GenerateResponse:
        entries = [pb.TokenLogprobs(chosen=pb.TokenLogprob(token_id=i, logprob=-1.0, rank=1)) for i in ids]
        return pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(first_position=first, logprobs=entries))

    made = assembly(start(prompt_logprobs=0), frame(1, [6]))
    assert not made.next_call().resume.prompt_logprobs_delivered
    event = made.accept(frame(1, [6, 7]))
    assert isinstance(event, PromptScored)
    assert (event.first_position, [p.chosen.token_id for p in event.logprobs]) == (2, [7])
    assert made.next_call().resume.prompt_logprobs_delivered
    assert len(made.generation().prompt_logprobs) == 2


def test_a_request_that_resumes_goes_on_where_it_began() -> None:
    """Its tokens count from the first one; the text that came before it is another's."""
    asked = pb.GenerateRequest(request_id="r", resume=pb.Resume(attempt=2, prompt_token_ids=PROMPT))
    asked.resume.choices.add(index=0, output_token_ids=[1, 2], text_bytes_delivered=5)
    asked.resume.choices.add(index=1, output_token_ids=[3], text_bytes_delivered=1, finished=True)
    made = Assembly(asked)
    for message in (start(n=2), chunk(2, [4], "b")):
        made.accept(message)
    again = made.next_call()
    assert again.resume.attempt == 3
    assert again.resume.prompt_token_ids == PROMPT
    found = [(each.index, list(each.output_token_ids), each.text_bytes_delivered) for each in again.resume.choices]
    assert found == [(0, [1, 2, 4], 6), (1, [3], 1)]
    made.accept(chunk(3, [5], "c", finish=LENGTH))
    made.accept(finished())
    first, second = made.generation().choices
    assert (first.token_ids, first.text, second.finish_reason) == ((1, 2, 4, 5), "bc", FinishReason.STOP)
