"""configs.sampling is the one table of sampling parameters; all that must repeat it (wire, classes, docs) agrees."""

import dataclasses
import re
import types
from typing import Any

import pytest
import typer
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from typer.testing import CliRunner

from configs import sampling as table
from configs.sampling import FROM_MODEL, PARAMETERS, Parameter
from octavo.cli import call
from octavo.client.requests import SamplingParams
from protos.inference_pb2 import SamplingParams as Message
from router.api.gateway.openai.convert import completion_messages
from router.api.gateway.openai.schemas import CompletionRequest, SamplingRequest
from router.compat.smg import generate_request
from tests.support.repository import ROOT
from worker.model_config import SamplingDefaults

# Names that OpenAI's API has; docs/http.md lists the others.
OPENAI = {"temperature", "top_p", "presence_penalty", "frequency_penalty"}
each_parameter = pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)


def comment_of(field: str) -> str:
    """The comment above a field of SamplingParams in the .proto."""
    text = (ROOT / "protos" / "inference.proto").read_text()
    body = text[text.index("message SamplingParams {") :]
    found = re.search(rf"((?:  //.*\n)+)  [\w<>, ]* {field} = \d+;", body)
    assert found is not None, field
    return found[1]


def bounds() -> str:
    text = (ROOT / "docs" / "wires.md").read_text()
    return " ".join(text[text.index("### Bounds") : text.index("### Resume")].split())


def test_the_wire_has_no_number_beside_the_table() -> None:
    """Except counts, positions and seeds, which have rules of their own."""
    numbers = {f.name for f in Message.DESCRIPTOR.fields if f.cpp_type in (f.CPPTYPE_FLOAT, f.CPPTYPE_INT32)}
    assert numbers == {parameter.name for parameter in PARAMETERS}


@each_parameter
def test_the_wire(parameter: Parameter) -> None:
    field = Message.DESCRIPTOR.fields_by_name[parameter.name]
    assert field.has_presence == parameter.from_model
    assert (field.cpp_type == field.CPPTYPE_FLOAT) == (parameter.kind is float)
    # An unset field without presence reads 0.
    assert parameter.from_model or parameter.default == 0
    assert f"In {parameter.range}" in comment_of(parameter.name)
    assert comment_of(parameter.name).rstrip().endswith(f"Default {parameter.default:g}.")


@pytest.mark.parametrize(
    ("field", "words"),
    {
        "n": f"1 to {table.MAX_CHOICES}.",
        "logprobs": f"0 to {table.MAX_LOGPROBS}.",
        "prompt_logprobs": f"0 to {table.MAX_LOGPROBS}.",
        "stop": f"Up to {table.MAX_STOP_STRINGS} strings of 1 to {table.MAX_STOP_CHARS} characters.",
        "stop_token_ids": f"Up to {table.MAX_STOP_TOKENS} token ids",
        "allowed_token_ids": f"At most {table.MAX_ALLOWED_TOKENS};",
        "logprob_token_ids": f"At most {table.MAX_LOGPROB_TOKENS};",
        "bad_words": f"Up to {table.MAX_BAD_WORDS} strings of 1 to {table.MAX_STOP_CHARS} characters",
        "bad_word_token_ids": f"at most {table.MAX_BAD_WORDS}, of {table.MAX_BAD_WORD_TOKENS} tokens",
        "logit_bias": f"in [-{table.LARGEST_LOGIT_BIAS}, {table.LARGEST_LOGIT_BIAS}]. "
        f"At most {table.MAX_LOGIT_BIAS} entries",
    }.items(),
)
def test_the_wires_comments_on_lists_and_counts(field: str, words: str) -> None:
    assert words in comment_of(field)


@pytest.mark.parametrize("cls", [SamplingParams, SamplingRequest])
def test_what_clients_fill_in(cls: type) -> None:
    if cls is SamplingParams:
        fields = {field.name: (field.type, field.default) for field in dataclasses.fields(cls)}
    else:
        fields = {name: (field.annotation, field.default) for name, field in SamplingRequest.model_fields.items()}
    for parameter in PARAMETERS:
        expected = (parameter.kind | None, None) if parameter.from_model else (parameter.kind, parameter.default)
        assert fields[parameter.name] == expected
        assert isinstance(expected[0], types.UnionType) == parameter.from_model


def test_what_a_model_says() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(SamplingDefaults)}
    assert fields == {parameter.name: parameter.kind | None for parameter in FROM_MODEL}


def test_the_example_of_each_says_something_else_than_its_default() -> None:
    for parameter in PARAMETERS:
        assert parameter.contains(parameter.example)
        assert parameter.example != parameter.default


@each_parameter
def test_it_comes_in_through_every_edge(parameter: Parameter, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {parameter.name: parameter.example}
    expected = getattr(Message(**given), parameter.name)

    from_python = SamplingParams(**given).to_proto()
    [from_http] = completion_messages(CompletionRequest.model_validate({"prompt": "a"} | given), "id")
    from_flags: list[SamplingParams] = []
    monkeypatch.setattr(call, "_stream", lambda *args, **options: from_flags.append(args[2]))
    app = typer.Typer()
    call.register(app, "Ask a model")
    flag = f"--{parameter.name.replace('_', '-')}={parameter.example}"
    for words in (["complete", "a"], ["chat", "a"]):
        assert CliRunner().invoke(app, [*words, flag]).exit_code == 0
    messages = [from_python, from_http.sampling, *(sampling.to_proto() for sampling in from_flags)]
    if parameter.name in vllm.SamplingParams.DESCRIPTOR.fields_by_name:
        messages.append(generate_request(vllm.GenerateRequest(sampling_params=given), "id").sampling)
    assert len(from_flags) == 2
    for message in messages:
        assert getattr(message, parameter.name) == expected


@each_parameter
def test_docs_name_it(parameter: Parameter) -> None:
    default = f"{parameter.default:g}" + (", or the model's" if parameter.from_model else "")
    assert f"| `{parameter.name}` | {parameter.range} | {default} | {parameter.doc} |" in bounds()
    assert parameter.name in OPENAI or f"`{parameter.name}`" in (ROOT / "docs" / "http.md").read_text()


def test_docs_say_how_much_lists_hold() -> None:
    for words in (
        f"| `n` | {table.MAX_CHOICES} |",
        f"| `stop` | {table.MAX_STOP_STRINGS} strings of 1 to {table.MAX_STOP_CHARS} characters |",
        f"| `stop_token_ids` | {table.MAX_STOP_TOKENS} |",
        f"| `logit_bias` | {table.MAX_LOGIT_BIAS} entries in [-{table.LARGEST_LOGIT_BIAS}, {table.LARGEST_LOGIT_BIAS}]",
        f"| `allowed_token_ids` | {table.MAX_ALLOWED_TOKENS} |",
        f"| `logprob_token_ids` | {table.MAX_LOGPROB_TOKENS} |",
        f"| `bad_words` | {table.MAX_BAD_WORDS} strings of 1 to {table.MAX_STOP_CHARS} characters |",
        f"| `bad_word_token_ids` | {table.MAX_BAD_WORDS} sequences, those of `bad_words` included, of "
        f"{table.MAX_BAD_WORD_TOKENS} tokens in all |",
        f"| `logprobs`, `prompt_logprobs` | {table.MAX_LOGPROBS}, or the replicas' `max_logprobs`, which is at most "
        f"{table.MOST_LOGPROBS} |",
    ):
        assert words in bounds()


@each_parameter
def test_ranges(parameter: Parameter) -> None:
    assert parameter.contains(parameter.default)
    assert parameter.contains(parameter.high)
    assert parameter.contains(parameter.low) != parameter.low_is_open
    for outside in (parameter.low - 1, parameter.high + 1, float("nan"), float("inf"), -float("inf")):
        assert not parameter.contains(outside)
