"""Budgets of reasoning at intake: what travels, and what is refused."""

import pytest

from configs.features import needed_by
from protos import inference_pb2 as pb
from router.errors import InvalidRequest
from router.request.features import beams, thinking
from router.request.outputs import Outputs
from tests.fakes.routers import smollm2_tokenizer
from tests.support.parsing import CHAT, parse

MODEL = pb.ModelInfo(vocab_size=49_152)
REGEX = pb.Constraint(regex="[0-9]+")


def resolved(
    reasoning: str = "qwen3",
    prompt: str = "<|im_start|>assistant\n",
    calls: str = "none",
    *,
    tools: bool = False,
    budget: int | None = 5,
    **sampling: object,
) -> pb.SamplingParams:
    message = pb.GenerateRequest(sampling=pb.SamplingParams(**sampling))  # type: ignore[arg-type]
    if budget is not None:
        message.sampling.thinking_token_budget = budget
    if tools:
        message.chat.tools.extend(CHAT.tools)
    tokenizer = smollm2_tokenizer()
    found = pb.SamplingParams()
    found.CopyFrom(message.sampling)
    Outputs(tokenizer, calls, reasoning).resolve(message, found, tokenizer.encode(prompt), thinking.FIELDS)
    thinking.check_against_model(found, MODEL)
    return found


def end_of(sampling: pb.SamplingParams) -> str:
    return smollm2_tokenizer().decode(sampling.reasoning_marks.end_token_ids, skip_special_tokens=False)


HARMONY_END = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("reasoning", "prompt", "end"),
    [
        ("qwen3", "<think>\n", "\n</think>\n\n"),
        ("qwen3", "x", "\n</think>\n\n"),
        ("deepseek_r1", "x", "\n</think>\n\n"),
        ("granite", "x", "\n\nHere is my response:"),
        ("mistral", "x", "[/THINK]"),
        ("gemma4", "x", "<channel|>"),
        ("openai_gptoss", "<|start|>assistant", HARMONY_END + "<|channel|>final<|message|>"),
    ],
)
def test_the_enforced_end_ends_the_reasoning_as_the_parser_reads_it(reasoning: str, prompt: str, end: str) -> None:
    sampling = resolved(reasoning, prompt, "openai" if reasoning == "openai_gptoss" else "none")
    marks = sampling.reasoning_marks
    assert end_of(sampling) == end
    assert sampling.thinking_token_budget == 5
    is_inside = prompt == "<think>\n" or reasoning == "deepseek_r1"
    assert marks.is_open == is_inside
    text = f"{'' if is_inside else marks.begins[0]}So I think{end}And so I say"
    calls = "openai" if reasoning == "openai_gptoss" else ""
    parsed = parse(text, calls, reasoning, prompt_end=prompt)
    assert parsed.reasoning.strip() == "So I think"
    assert parsed.content.strip() == "And so I say"
    assert needed_by(sampling) == {"thinking_token_budget"}


def test_where_there_is_no_reasoning_there_are_no_marks() -> None:
    """Then any replica may have the request."""
    for sampling in (
        resolved(prompt="<think>\n\n</think>\n\n"),
        # Grammars of this family do not wait, so that no reasoning can come.
        resolved("granite", constraint=REGEX),
        resolved(budget=None),
        resolved(budget=None, reasoning_marks=pb.ReasoningMarks(end_token_ids=[1])),
    ):
        assert not sampling.HasField("reasoning_marks")
        assert "thinking_token_budget" not in needed_by(sampling)


def test_a_constraint_begins_right_behind_the_enforced_end() -> None:
    sampling = resolved(constraint=REGEX)
    assert sampling.constraint.after == "</think>"
    assert end_of(sampling) == "\n</think>"
    own = resolved(constraint=pb.Constraint(regex="[0-9]+", after="Answer:"))
    assert end_of(own) == "\n</think>\n\n"
    harmony = ("openai_gptoss", "<|start|>assistant", "openai")
    assert end_of(resolved(*harmony, constraint=REGEX)) == HARMONY_END + "<|channel|>final<|message|>"
    # Where a call may come, the model writes the header.
    assert end_of(resolved(*harmony, tools=True)) == HARMONY_END
    # Without a budget, a constraint waits only if the output is parsed.
    assert resolved(budget=None, constraint=REGEX).constraint.after == ""


def test_calls_end_the_reasoning_where_the_format_says_so() -> None:
    assert resolved(calls="hermes", tools=True).reasoning_marks.ends == ["</think>", "<tool_call>"]
    assert resolved(calls="hermes").reasoning_marks.ends == ["</think>"]


def test_refusals_name_the_field() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.thinking_token_budget=0: no format of reasoning is known"):
        resolved("none", budget=0)
    with pytest.raises(InvalidRequest, match=r"thinking_token_budget is set, and allowed_token_ids lacks token \d+"):
        resolved(allowed_token_ids=[5, 6])
    message = pb.GenerateRequest(sampling=pb.SamplingParams(thinking_token_budget=2))
    message.beam_search.width = 2
    with pytest.raises(InvalidRequest, match=r"sampling\.thinking_token_budget=2: a beam search"):
        beams.check(message)


@pytest.mark.parametrize(
    ("marks", "budget", "words"),
    [
        (pb.ReasoningMarks(ends=["x"], end_token_ids=[1]), None, "set without thinking_token_budget"),
        (pb.ReasoningMarks(ends=["x"]), 1, "end_token_ids has 0 entries: use 1 to 64"),
        (pb.ReasoningMarks(ends=["x"], end_token_ids=[1] * 65), 1, "end_token_ids has 65 entries"),
        (pb.ReasoningMarks(ends=["x" * 257], end_token_ids=[1]), 1, "has 1 texts: use at most 16, of 1 to 256 bytes"),
        (pb.ReasoningMarks(begins=["x"] * 9, ends=["x"] * 8, end_token_ids=[1]), 1, "has 17 texts"),
        (pb.ReasoningMarks(ends=[""], end_token_ids=[1]), 1, "of 1 to 256 bytes"),
        (pb.ReasoningMarks(ends=["x"], end_token_ids=[49_152]), 1, r"end_token_ids\[0\]=49152: token ids of this"),
    ],
)
def test_a_resume_brings_its_marks_and_they_are_checked(
    marks: pb.ReasoningMarks, budget: int | None, words: str
) -> None:
    outputs = Outputs(smollm2_tokenizer(), "none", "none")
    good = pb.GenerateRequest(resume=pb.Resume(attempt=1), sampling=pb.SamplingParams(thinking_token_budget=3))
    good.sampling.reasoning_marks.CopyFrom(pb.ReasoningMarks(ends=["x"], end_token_ids=[1]))
    outputs.resolve(good, good.sampling, [1, 2], thinking.FIELDS)
    assert good.sampling.reasoning_marks.end_token_ids == [1]
    bad = pb.GenerateRequest(resume=pb.Resume(attempt=1), sampling=pb.SamplingParams(reasoning_marks=marks))
    if budget is not None:
        bad.sampling.thinking_token_budget = budget

    def check() -> None:
        outputs.resolve(bad, bad.sampling, [1, 2], thinking.FIELDS)
        thinking.check_against_model(bad.sampling, MODEL)

    with pytest.raises(InvalidRequest, match=words):
        check()
