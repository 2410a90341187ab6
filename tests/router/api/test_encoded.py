"""JSON that is encoded while it grows is what one encoding of the whole gives, in parts none of which is large."""

import json
from typing import Any

import msgspec
import pytest

from protos import inference_pb2 as pb
from router.api.encoded import PART_BYTES, Body, EncodedList, EncodedText, encode, parts_of
from router.api.gateway.anthropic.reply import MessageReply
from router.api.gateway.openai.chat import BatchReply, ChatReply
from router.api.gateway.openai.completion import CompletionReply
from router.api.gateway.openai.form import BatchForm, Form
from router.api.gateway.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs, text_of
from router.api.gateway.openai.reply import Reply
from router.streams.whole_answers import WholeAnswers
from tests.fakes.routers import smollm2_tokenizer

_BASE = {"id": "an-id", "created": 7, "model": "a-model"}
_PROMPT = [500, 501, 502]
_CHUNKS = 40


def _json(reply: Reply) -> Any:
    return json.loads(b"".join(parts_of(reply.whole())))


def _scored(position: int) -> pb.TokenLogprobs:
    tops = [
        pb.TokenLogprob(token_id=i, logprob=-i / 7 - position, rank=i, token=f'é"{i}'.encode()[: 1 + i])
        for i in range(1, 5)
    ]
    return pb.TokenLogprobs(chosen=tops[position % 4], top=tops)


def _events(num_choices: int, *, is_parsed: bool = False) -> list[pb.GenerateResponse]:
    events = [
        pb.GenerateResponse(started=pb.Started(prompt_token_ids=_PROMPT)),
        pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(first_position=1, logprobs=[_scored(0)])),
        pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(first_position=2, logprobs=[_scored(1)])),
    ]
    for position in range(_CHUNKS):
        for index in range(num_choices):
            text = f' "{position}\n\u2028 é{index}'
            chunk = pb.Chunk(index=index, token_ids=[position, index], text=text)
            chunk.logprobs.extend([_scored(position), _scored(position + index)])
            if is_parsed:
                kind = position % 3
                call = pb.ToolCallDelta(index=0, id="call", name="f" if position == 2 else "", arguments=text)
                delta = [pb.Delta(content=text), pb.Delta(reasoning=text), pb.Delta(tool_call=call)][kind]
                chunk.deltas.append(delta)
            if position == _CHUNKS - 1:
                chunk.finish.reason = pb.FINISH_REASON_LENGTH
            events.append(pb.GenerateResponse(chunk=chunk))
    events.append(pb.GenerateResponse(finished=pb.Finished(usage=pb.Usage(cached_tokens=2, reasoning_tokens=3))))
    return events


def _of_choice(index: int) -> tuple[str, list[int], list[pb.TokenLogprobs]]:
    """The text, tokens and logprobs of a choice of _events()."""
    chunks = [event.chunk for event in _events(index + 1) if event.HasField("chunk") and event.chunk.index == index]
    return (
        "".join(chunk.text for chunk in chunks),
        [token for chunk in chunks for token in chunk.token_ids],
        [each for chunk in chunks for each in chunk.logprobs],
    )


def _folded(reply: Any, events: list[pb.GenerateResponse], prompt: int = 0) -> Any:
    for event in events:
        reply.take(prompt, event)
    return reply


def test_a_growing_list_and_text_are_encoded_as_the_whole_is() -> None:
    values, text = [{"a": i, "b": ["é", None, i / 3]} for i in range(5000)], 'x"\\é\n\U0001f600' * 20_000
    room = WholeAnswers(2**30).begin((), 0)
    first, growing, told = EncodedList(), EncodedList(room.grow), EncodedText(grow=room.grow)
    first.extend(values[:10])
    after = EncodedList(before=first)
    for start in range(0, 5000, 100):
        growing.extend(values[start : start + 100])
        growing.extend([])
    for start in range(0, len(text), 1000):
        told.add(text[start : start + 1000])
    after.extend(values[10:20])
    tree = {"list": growing, "text": told, "after": after, "alone": EncodedList(before=first), "none": EncodedList()}
    whole = {"list": values, "text": text, "after": values[:20], "alone": values[:10], "none": []}
    assert room.size == growing.num_bytes + told.num_bytes
    body = Body(room)
    assert sum(1 for _ in body.fill({**tree, "nested": iter([{"x": iter([])}, 1]), "empty": {}})) > len(body.parts)
    assert b"".join(body.parts) == msgspec.json.encode({**whole, "nested": [{"x": []}, 1], "empty": {}})
    assert encode([tree]) == msgspec.json.encode([whole]), "in one piece"
    assert body.size == room.size == sum(map(len, body.parts)) > 5 * PART_BYTES
    assert max(map(len, body.parts)) < 2 * PART_BYTES


def test_a_leaf_that_nobody_counted_is_sent_in_parts_too() -> None:
    body, text = Body(WholeAnswers(2**30).begin((), 0)), "é" * 200_000
    for _ in body.fill({"content": [{"text": text}]}):
        pass
    assert json.loads(b"".join(body.parts)) == {"content": [{"text": text}]}
    assert max(map(len, body.parts)) == PART_BYTES
    assert body.room.size == body.size


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("has_echo", [False, True])
def test_a_completion(has_echo: bool, as_ids: bool) -> None:
    form = Form(
        num_choices=3,
        num_shown=3,
        num_logprobs=2,
        num_prompt_logprobs=3,
        has_token_ids=True,
        has_echo=has_echo,
        has_ids_for_tokens=as_ids,
    )
    table = smollm2_tokenizer()
    reply = CompletionReply(form, _BASE, 2, ["one", "two"], table)
    for prompt in range(2):
        _folded(reply, _events(3), prompt)
    whole = _json(reply)
    assert list(whole) == ["object", "id", "created", "model", "choices", "usage"]
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    first = pb.TokenLogprobs(chosen=pb.TokenLogprob(token_id=_PROMPT[0], token=table.token_bytes(_PROMPT[0])))
    of_prompt = [pb.TokenLogprobs(chosen=each.chosen, top=each.top[:2]) for each in (_scored(0), _scored(1))]
    for number, choice in enumerate(whole["choices"]):
        text, token_ids, logprobs = _of_choice(number % 3)
        shown = completion_logprobs(logprobs, 0, as_ids=as_ids)
        if has_echo:
            shown = completion_logprobs([first, *of_prompt, *logprobs], 0, as_ids=as_ids)
            # Nothing precedes the first token, and of the others only those asked for are shown.
            shown["token_logprobs"][0] = shown["top_logprobs"][0] = None
            for position, each in enumerate(of_prompt, 1):
                names = [f"token_id:{top.token_id}" if as_ids else text_of(top) for top in each.top]
                shown["top_logprobs"][position] = dict(zip(names, [top.logprob for top in each.top], strict=True))
        assert choice["logprobs"] == shown
        assert choice["text"] == ["one", "two"][number // 3] * has_echo + text
        assert (choice["token_ids"], choice["prompt_token_ids"]) == (token_ids, _PROMPT)
        assert choice["prompt_logprobs"] == [None, *prompt_logprobs([_scored(0), _scored(1)], 3)]
    assert whole["usage"]["completion_tokens"] == 2 * 3 * 2 * _CHUNKS


def test_the_best_completions_come_first() -> None:
    reply = CompletionReply(Form(num_choices=3, num_shown=2, num_logprobs=0), _BASE, 1, [], smollm2_tokenizer())
    for index, logprob in enumerate((-3.0, -1.0, -2.0)):
        chunk = pb.Chunk(index=index, text=f"{index}", token_ids=[1], finish=pb.Finish(reason=pb.FINISH_REASON_STOP))
        chunk.logprobs.add().chosen.logprob = logprob
        reply.take(0, pb.GenerateResponse(chunk=chunk))
    assert [choice["text"] for choice in _json(reply)["choices"]] == ["1", "2"]


def _check_chat(choice: dict[str, Any], index: int) -> None:
    text, token_ids, logprobs = _of_choice(index)
    assert choice["logprobs"] == chat_logprobs(logprobs)
    assert choice["message"] == {"role": "assistant", "content": f"before{text}", "refusal": None}
    assert (choice["token_ids"], choice["finish_reason"]) == (token_ids, "length")


def test_a_chat_and_a_batch_of_chats() -> None:
    form = Form(num_choices=2, num_logprobs=4, num_prompt_logprobs=1, has_token_ids=True, echoed="before")
    table = smollm2_tokenizer()
    whole = _json(_folded(ChatReply(form, _BASE, table), _events(2)))
    for index, choice in enumerate(whole["choices"]):
        _check_chat(choice, index)
    assert whole["prompt_logprobs"] == [None, *prompt_logprobs([_scored(0), _scored(1)], 1)]
    assert whole["prompt_token_ids"] == _PROMPT

    batch = BatchReply(BatchForm(chats=(form, form)), _BASE, table)
    for prompt in range(2):
        _folded(batch, _events(2), prompt)
    whole = _json(batch)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    for number, choice in enumerate(whole["choices"]):
        _check_chat(choice, number % 2)
        assert choice["prompt_token_ids"] == _PROMPT
    assert whole["usage"]["completion_tokens"] == 2 * 2 * 2 * _CHUNKS


def test_a_chat_and_a_message_that_are_parsed() -> None:
    form, table = Form(is_parsed=True), smollm2_tokenizer()
    texts = [f' "{position}\n\u2028 é0' for position in range(_CHUNKS)]
    content, reasoning, arguments = ("".join(texts[kind::3]) for kind in range(3))
    said = _json(_folded(ChatReply(form, _BASE, table), _events(1, is_parsed=True)))["choices"][0]["message"]
    assert (said["content"], said["reasoning"], said["reasoning_content"]) == (content, reasoning, reasoning)
    call = {"id": "call", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert said["tool_calls"] == [call]
    message = _json(_folded(MessageReply(form, "msg", "a-model", table), _events(1, is_parsed=True)))
    assert [block["type"] for block in message["content"][:3]] == ["text", "thinking", "tool_use"]
    assert message["content"][0] == {"type": "text", "text": texts[0]}


def test_what_is_dropped_is_not_shown() -> None:
    """max_tokens=0: the prompt's logprobs are asked for."""
    form = Form(num_logprobs=1, has_echo=True, drops_output=True)
    whole = _json(_folded(CompletionReply(form, _BASE, 1, ["prompt"], smollm2_tokenizer()), _events(1)))
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("prompt", "length")
    assert len(choice["logprobs"]["tokens"]) == len(_PROMPT)
    assert whole["usage"]["completion_tokens"] == 0
