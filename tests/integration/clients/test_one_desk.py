"""LLM, AsyncLLM and a router give one answer, or one refusal, to a request: they have one desk (router.request)."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct

from configs.load import load_options
from octavo import LLM, AsyncLLM, Generation
from octavo.client.errors import OctavoError
from octavo.local.own_cluster import Workers
from protos import inference_pb2 as pb
from tests.support.models.vision_models import IMAGE, VOCAB_SIZE, file_of, picture, qwen2_5_vl, write_model

_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{{ mood }}{% if add_generation_prompt %}>{% endif %}"
)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory": 0.02,
    "worker_threads": 1,
    "max_model_len": 128,
    "max_logprobs": 6,
    "limit_mm_per_prompt": {"image": 1},
    "tool_call_parser": "hermes",
    "reasoning_parser": "deepseek_r1",
}
TINY: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
FILE = file_of(picture(30, 40))
TOOL = pb.Tool(name="f", parameters_json='{"type": "object", "properties": {}, "additionalProperties": false}')
BAD_TOOL = pb.Tool(name="g", parameters_json='{"type": "object", "not": {}}')
LONG = pb.TokenIds(ids=[5] * 200)


def asked(prompt: object = "ab", **fields: Any) -> pb.GenerateRequest:
    """A request for three greedy tokens, unless the fields say otherwise. Its sampling comes as a dict."""
    sampling = TINY | fields.pop("sampling", {})
    sampling = {name: value for name, value in sampling.items() if value is not None}
    match prompt:
        case str():
            fields["prompt"] = prompt
        case pb.ChatPrompt():
            fields["chat"] = prompt
        case pb.TokenIds():
            fields["token_ids"] = prompt
        case list():
            fields["token_ids"] = pb.TokenIds(ids=prompt)
    return pb.GenerateRequest(sampling=pb.SamplingParams(**sampling), **fields)


def drawn(**sampling: Any) -> pb.GenerateRequest:
    return asked(sampling=sampling)


def chat(*contents: str, **fields: Any) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=each) for each in contents or ("ab",)], **fields)


def resumed(**fields: Any) -> pb.GenerateRequest:
    """The rest of an output of six tokens, two of which its client has."""
    resume = {
        "attempt": 1,
        "prompt_token_ids": [68, 69],
        "choices": [pb.ResumeChoice(index=0, output_token_ids=[70, 71], text_bytes_delivered=1)],
        **fields,
    }
    return asked(None, resume=pb.Resume(**resume), sampling={"max_tokens": 6, "seed": 3})


def constrained(**sampling: Any) -> pb.GenerateRequest:
    own = pb.Constraint(choice=pb.Alternatives(texts=["yes", "no"]))
    return asked(sampling={"ignore_eos": False, "max_tokens": 6, "constraint": own} | sampling)


def _struct(**fields: Any) -> Struct:
    made = Struct()
    made.update(fields)
    return made


image = pb.Item(image=pb.Image(data=FILE))
parts = pb.ChatMessage(role="user", parts=[pb.ContentPart(text="a"), pb.ContentPart(item=image)])
repetition = pb.RepetitionDetection
CASES: dict[str, pb.GenerateRequest] = {
    "text": asked(),
    "token ids": asked([5, 6, 7]),
    "no input": asked(None),
    "empty text": asked(""),
    "no token ids": asked([]),
    "unknown token": asked([5, VOCAB_SIZE]),
    "too long": asked(LONG),
    "a text that is too long": asked("a" * 5000),
    "the model's name": asked(model="qwen"),
    "no such model": asked(model="no-such-model"),
    "bad request id": asked(request_id="a b"),
    "priority": asked(priority=-3),
    "cache_salt": asked(cache_salt="s"),
    "long cache_salt": asked(cache_salt="s" * 257),
    "session_key": asked(session_key="k"),
    "long session_key": asked(session_key="k" * 257),
    "no special tokens": asked(add_special_tokens=False),
    "truncated": asked(LONG, truncate_prompt_tokens=4),
    "truncated on the right": asked("abcdef", truncate_prompt_tokens=2, truncation_side=pb.TRUNCATION_SIDE_RIGHT),
    "truncated to what fits": asked(LONG, truncate_prompt_tokens=0),
    "suffix": asked("def f(", suffix="return 1", sampling={"max_tokens": 4}),
    "suffix of token ids": asked([5], suffix="a"),
    "suffix and truncation": asked(suffix="a", truncate_prompt_tokens=3),
    "beams": asked(beam_search=pb.BeamSearch(width=2), sampling={"n": 2}),
    "beams that favour short outputs": asked(beam_search=pb.BeamSearch(width=2, length_penalty=-1)),
    "too many beams": asked(beam_search=pb.BeamSearch(width=33)),
    "more outputs than beams": asked(beam_search=pb.BeamSearch(width=2), sampling={"n": 3}),
    "beams and a constraint": asked(
        beam_search=pb.BeamSearch(width=2),
        sampling={"constraint": pb.Constraint(json_object=True), "ignore_eos": False},
    ),
    "parsed beams": asked(chat(), beam_search=pb.BeamSearch(width=2), parse_output=True),
    "chat": asked(chat()),
    "chat without messages": asked(pb.ChatPrompt()),
    "chat without a role": asked(pb.ChatPrompt(messages=[pb.ChatMessage(content="a")])),
    "template arguments": asked(chat(template_arguments=_struct(mood="sad"))),
    "template arguments twice": asked(chat(template_arguments=_struct(a=1), template_arguments_json="{}")),
    "own template": asked(chat(chat_template="x{{ messages[0].content }}")),
    "a template that fails": asked(chat(chat_template="{% for")),
    "no generation prompt": asked(chat(add_generation_prompt=False)),
    "continued": asked(chat("ab", "cd", continue_final_message=True)),
    "continued, and not": asked(chat(continue_final_message=True, add_generation_prompt=True)),
    "parsed": asked(chat(), parse_output=True),
    "parsed without reasoning": asked(chat(), parse_output=True, include_reasoning=False),
    "a call that must come": asked(
        chat(tools=[TOOL], tool_choice=pb.TOOL_CHOICE_REQUIRED, parallel_tool_calls=False),
        parse_output=True,
        sampling={"ignore_eos": False, "max_tokens": 80},
    ),
    "a call of nothing": asked(chat(tool_choice=pb.TOOL_CHOICE_REQUIRED)),
    "a tool that is not there": asked(chat(tools=[TOOL], tool_choice=pb.TOOL_CHOICE_NAMED, tool_name="h")),
    "a tool that nothing follows": asked(
        chat(tools=[TOOL, BAD_TOOL], tool_choice=pb.TOOL_CHOICE_REQUIRED), sampling={"ignore_eos": False}
    ),
    "tools and ignore_eos": asked(chat(tools=[TOOL], tool_choice=pb.TOOL_CHOICE_REQUIRED)),
    "large tools": asked(
        chat(
            tools=[pb.Tool(name="f", parameters_json=json.dumps({"title": "x" * 300_000}))],
            tool_choice=pb.TOOL_CHOICE_REQUIRED,
        )
    ),
    "image": asked("a<image>b", items=[image]),
    "image by its token": asked([5, IMAGE, 6], items=[image]),
    "image in a chat": asked(pb.ChatPrompt(messages=[parts])),
    "image with options": asked("<image>", items=[image], item_options=pb.ItemOptions(max_pixels=1024)),
    "image without a placeholder": asked("ab", items=[image]),
    "two images": asked("<image><image>", items=[image, image]),
    "images beside a chat": asked(chat(), items=[image]),
    "no image": asked("<image>", items=[pb.Item(image=pb.Image(data=b"GIF89a"))]),
    "options of nothing": asked("<image>", items=[image], item_options=pb.ItemOptions(max_pixels=0)),
    "detach_timeout of none": asked(detach_timeout=0),
    "long detach_timeout": asked(detach_timeout=4000),
    "resume": resumed(),
    "resume of all": resumed(
        choices=[pb.ResumeChoice(index=0, output_token_ids=[70, 71, 72, 73, 74, 75], text_bytes_delivered=6)]
    ),
    "resume without an attempt": resumed(attempt=0),
    "resume of an unknown token": resumed(prompt_token_ids=[VOCAB_SIZE]),
    "resume with text that is not there": resumed(
        choices=[pb.ResumeChoice(index=0, output_token_ids=[70], text_bytes_delivered=9)]
    ),
    "resume of another choice": resumed(choices=[pb.ResumeChoice(index=1)]),
    "resume with items that are gone": resumed(items=[pb.ItemSpan(name=b"x" * 32, num_tokens=1)]),
    "drawn": drawn(temperature=0.9, top_p=0.8, top_k=7, min_p=0.01, top_n_sigma=2, seed=5, n=2),
    "temperature": drawn(temperature=-1),
    "penalties": drawn(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, logit_bias={70: 4.5}),
    "bias of an unknown token": drawn(logit_bias={VOCAB_SIZE: 1}),
    "large bias": drawn(logit_bias={5: 101}),
    "too many choices": drawn(n=65),
    "all that fits": drawn(max_tokens=None, temperature=1, seed=1),
    "max_tokens": drawn(max_tokens=200),
    "no max_tokens": drawn(max_tokens=0),
    "min_tokens": drawn(min_tokens=2, ignore_eos=False),
    "more min_tokens than max_tokens": drawn(min_tokens=4),
    "stop tokens": drawn(stop_token_ids=range(0, 390, 7), max_tokens=20),
    "unknown stop token": drawn(stop_token_ids=[VOCAB_SIZE]),
    "stop strings": drawn(stop=["=", "2P"], include_stop_str_in_output=True, max_tokens=40),
    "empty stop string": drawn(stop=[""]),
    "too many stop tokens": drawn(stop_token_ids=range(65)),
    "repetition": drawn(repetition_detection=repetition(max_pattern_size=4, min_count=2), max_tokens=60),
    "repetition that is off": drawn(repetition_detection=repetition()),
    "repetition once": drawn(repetition_detection=repetition(max_pattern_size=4, min_count=1)),
    "allowed tokens": drawn(allowed_token_ids=[70, 71]),
    "no token left": drawn(allowed_token_ids=[2], min_tokens=1, ignore_eos=False),
    "bad words": drawn(bad_words=["a", "bc"], bad_word_token_ids=[pb.TokenIds(ids=[70])]),
    "an empty bad word": drawn(bad_words=[""]),
    "logprobs": drawn(logprobs=2, prompt_logprobs=1),
    "too many logprobs": drawn(logprobs=7),
    "all logprobs": drawn(logprobs=2**32 - 1),
    "logprobs of tokens": drawn(logprob_token_ids=[70, 71, 70]),
    "logprobs of tokens, and others": drawn(logprob_token_ids=[70, 71], logprobs=5),
    "special tokens": drawn(skip_special_tokens=False),
    "constraint": constrained(),
    "constraint of no kind": constrained(constraint=pb.Constraint()),
    "constraint that can't be compiled": constrained(constraint=pb.Constraint(json_schema='{"not": {}}')),
    "constraint and ignore_eos": constrained(ignore_eos=True),
    "budget of reasoning": asked(chat(), parse_output=True, sampling={"thinking_token_budget": 2, "max_tokens": 16}),
    "budget without its end": drawn(thinking_token_budget=2, allowed_token_ids=[70]),
    "no drafts": drawn(num_speculative_tokens=0),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "qwen"
    write_model(qwen2_5_vl, directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    tokenizer = directory / "tokenizer.json"
    text = tokenizer.read_text()
    for place, name in enumerate(("prefix", "suffix", "middle")):
        text = text.replace(f"<unused_{place}>", f"<fim_{name}>")
    tokenizer.write_text(text)
    return str(directory)


# Generates for a message.
Ask = Callable[[pb.GenerateRequest], Any]


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, **OPTIONS)


@pytest.fixture(scope="module")
def async_llm(model: str) -> Iterator[AsyncLLM]:
    made = AsyncLLM(model, **OPTIONS)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def router(model: str) -> Iterator[Workers]:
    """The cluster of an LLM with several workers, with one."""
    made = Workers(load_options(flags={"model": model, **OPTIONS}, environ={}))
    yield made
    made.close()


def told(answer: Generation | OctavoError) -> object:
    """Returns the parts that must be the same. How many blocks of a prompt were cached depends on earlier requests."""
    if isinstance(answer, OctavoError):
        return type(answer), str(answer)
    assert answer.usage is not None
    return replace(answer, usage=replace(answer.usage, cached_tokens=0))


@pytest.mark.parametrize("name", CASES)
async def test_a_request_is_answered_in_one_way(name: str, llm: LLM, async_llm: AsyncLLM, router: Workers) -> None:
    message = CASES[name]
    message.request_id = message.request_id or name.replace(" ", "-").replace(",", "").replace("'", "")
    if not message.sampling.HasField("seed"):
        # A greedy request does not use these, but shows them.
        message.sampling.seed = 1
    sent = message.SerializeToString(deterministic=True)

    async def streamed() -> Generation:
        [*_, found] = [output async for output in async_llm.generate(message)]
        return found

    answers = [_tried(lambda: llm.generate(message)[0]), None, _tried(lambda: router.compute([(message, None, {})])[0])]
    try:
        answers[1] = await streamed()
    except OctavoError as error:
        answers[1] = error
    by_llm, by_async_llm, by_router = map(told, answers)
    assert by_llm == by_router
    assert by_async_llm == by_router
    assert message.SerializeToString(deterministic=True) == sent


def _tried(ask: Callable[[], Generation]) -> Generation | OctavoError:
    try:
        return ask()
    except OctavoError as error:
        return error


def test_the_requests_have_every_field_set() -> None:
    """A new field of a request has a request here."""
    for kind, of_case in (
        (pb.GenerateRequest, lambda message: message),
        (pb.SamplingParams, lambda message: message.sampling),
    ):
        seen = {field.name for message in CASES.values() for field, _ in of_case(message).ListFields()}
        # Only Started and a resume have it, and only of models that reason.
        assert {field.name for field in kind.DESCRIPTOR.fields} - {"reasoning_marks"} <= seen
    assert len(CASES) >= 60
