"""A gRPC answer that is made in pieces of its wire form is the message that folding the events gives."""

import pytest

from protos import inference_pb2 as pb
from router.api.whole_messages import WholeResult
from router.errors import InvalidRequest
from router.streams.whole_answers import WholeAnswers


def _scored(position: int) -> pb.TokenLogprobs:
    tops = [pb.TokenLogprob(token_id=i, logprob=-i - position, rank=i, token=b"word") for i in range(20)]
    return pb.TokenLogprobs(chosen=tops[0], top=tops)


def test_the_result_is_the_sum_of_the_events() -> None:
    # Choices of less than 128 bytes, and of more than a part.
    lengths = (1, 10, 400)
    expected = pb.GenerateResult(started=pb.Started(request_id="an-id", prompt_token_ids=[1, 2]))
    expected.prompt_logprobs.extend([_scored(0), _scored(1)])
    expected.usage.prompt_tokens = 2
    room = WholeAnswers(2**30).begin((), 0)
    result = WholeResult(len(lengths), room)
    result.add(pb.GenerateResponse(started=expected.started))
    for position, each in enumerate(expected.prompt_logprobs, 1):
        frame = pb.PromptLogprobs(first_position=position, logprobs=[each])
        result.add(pb.GenerateResponse(prompt_logprobs=frame))
    for index, length in enumerate(lengths):
        choice = expected.choices.add(index=index, exact=True)
        for position in range(length):
            chunk = pb.Chunk(index=index, first_token=position, text=f"é{position}", token_ids=[position], exact=True)
            call = pb.ToolCallDelta(index=0, id="call" * (not position), name="f" * (not position), arguments="{}")
            chunk.deltas.extend([pb.Delta(content="c"), pb.Delta(reasoning="r"), pb.Delta(tool_call=call)])
            if index:
                chunk.logprobs.append(_scored(position))
            if position == length - 1:
                chunk.finish.reason = pb.FINISH_REASON_LENGTH
                choice.finish.CopyFrom(chunk.finish)
            result.add(pb.GenerateResponse(chunk=chunk))
            choice.text += chunk.text
            choice.token_ids.append(position)
            choice.logprobs.extend(chunk.logprobs)
        choice.content, choice.reasoning = "c" * length, "r" * length
        choice.tool_calls.add(id="call", name="f", arguments="{}" * length)
    result.add(pb.GenerateResponse(finished=pb.Finished(usage=expected.usage)))
    parts = result.take_parts()
    assert pb.GenerateResult.FromString(b"".join(parts)) == expected
    assert max(map(len, parts)) < 2 * 64 * 1024 < sum(map(len, parts))


def test_a_result_that_grows_too_long_ends() -> None:
    room = WholeAnswers(2**30).begin((), 0, 2**20, is_message=True)
    result = WholeResult(1, room)
    event = pb.GenerateResponse(chunk=pb.Chunk(token_ids=[1], logprobs=[_scored(1)] * 1000))
    for _ in range(2):
        result.add(event)
    with pytest.raises(InvalidRequest, match="more than 1048576 bytes"):
        result.add(event)
    room.close()
