"""The requests that clients send for what users write."""

import json
import re
import subprocess
import sys

import pydantic
import pytest

from octavo import Constraint, InvalidRequest, SamplingParams
from octavo.client.requests import generate_request
from protos import inference_pb2 as pb


def test_text_messages_and_token_ids_are_told_apart() -> None:
    assert generate_request("hi", None, {}).prompt == "hi"
    chat = generate_request([{"role": "user", "content": "hi"}], None, {"template_arguments": {"thinking": False}}).chat
    assert chat.messages[0].role == "user"
    assert json.loads(chat.template_arguments_json) == {"thinking": False}
    assert generate_request("a", None, {"suffix": "c"}).suffix == "c"
    assert generate_request([{"role": "user", "content": "hi"}], None, {"chat_template": "x"}).chat.chat_template == "x"
    assert list(generate_request([1, 2], None, {}).token_ids.ids) == [1, 2]


def test_an_empty_prompt_reaches_the_server_which_refuses_it() -> None:
    assert generate_request("", None, {}).WhichOneof("input") == "prompt"
    assert generate_request([], None, {}).WhichOneof("input") == "token_ids"


def test_every_request_has_an_id_of_its_own() -> None:
    assert generate_request("hi", None, {}).request_id != generate_request("hi", None, {}).request_id
    assert generate_request("hi", None, {"request_id": "mine"}).request_id == "mine"


@pytest.mark.parametrize("prompt", [[1, -2], [2**40], [1, "a"]])
def test_what_is_no_prompt_is_refused(prompt: list) -> None:
    with pytest.raises(InvalidRequest, match="a prompt is text, messages or token ids"):
        generate_request(prompt, None, {})


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("temperature", r"^temperature is a sampling parameter: give SamplingParams\(temperature=\.\.\.\)$"),
        ("cache_sald", "^cache_sald is no option of a request; did you mean cache_salt?"),
        ("zzz", "^zzz is no option of a request: use one of allowed_tools, "),
    ],
)
@pytest.mark.parametrize("prompt", ["Once upon", pb.GenerateRequest(prompt="Once upon")])
def test_unknown_options_are_refused_by_name(prompt: str | pb.GenerateRequest, option: str, why: str) -> None:
    """Before, they were ignored: `temperature=0` beside the prompt still drew tokens."""
    with pytest.raises(InvalidRequest, match=why):
        generate_request(prompt, None, {option: 0})  # type: ignore[misc]


def test_a_message_needs_role_and_content() -> None:
    for message in ({"role": "user"}, {"content": "x", "name": "x"}, {"role": "user", "content": 1}):
        with pytest.raises(InvalidRequest, match="a message has a role and a content, text or parts, but one has "):
            generate_request([message], None, {})


def test_what_else_a_message_has_goes_to_the_template() -> None:
    said = {"thinking": {"zoo": 2**53 + 1, "ant": 1.0}}
    sent = generate_request([{"role": "assistant", "content": None, **said}], None, {}).chat.messages[0]
    assert (sent.role, sent.content, json.loads(sent.fields_json)) == ("assistant", "", said)
    with pytest.raises(InvalidRequest, match="a message's other fields cannot be written as JSON"):
        generate_request([{"role": "user", "content": "x", "name": {1}}], None, {})


def test_unset_sampling_fields_stay_unset() -> None:
    assert SamplingParams().to_proto() == pb.SamplingParams(n=1)


def test_sampling_goes_to_the_wire_and_back() -> None:
    sampling = SamplingParams(
        temperature=0.5, top_k=3, logit_bias={7: -2.0}, stop=("a", "b"), stop_token_ids=(4,), seed=2**63, logprobs=0
    )
    assert SamplingParams.from_proto(sampling.to_proto()) == sampling
    assert list(SamplingParams(stop="end").to_proto().stop) == ["end"]


@pytest.mark.parametrize("bad", [{"max_tokens": -1}, {"seed": 2**64}, {"top_k": "many"}, {"logit_bias": {-1: 0.0}}])
def test_what_the_wire_cannot_carry_names_its_field(bad: dict) -> None:
    with pytest.raises(InvalidRequest, match=f"^{next(iter(bad))}="):
        SamplingParams(**bad).to_proto()


def test_importing_the_clients_loads_no_torch() -> None:
    code = (
        "import sys, octavo; octavo.Client; octavo.AsyncClient; octavo.SamplingParams; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_all_public_names_can_be_imported() -> None:
    import octavo

    of_clients = [name for name, module in octavo._MODULE_OF.items() if module.startswith("octavo.client.")]
    missing = [name for name in of_clients if not hasattr(octavo, name)]
    assert not missing
    assert set(octavo.__all__) == set(octavo._MODULE_OF)
    with pytest.raises(AttributeError, match="no attribute 'Nonesuch'"):
        octavo.Nonesuch  # noqa: B018


SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}


class Capital(pydantic.BaseModel):
    city: str


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(json='{"type": "object"}', disable_any_whitespace=True, disable_additional_properties=True),
        Constraint(regex="[a-z]+", after="</think>"),
        Constraint(choice=("yes", "no")),
        Constraint(grammar="start: /a/"),
        Constraint(json_object=True),
        Constraint(structural_tag="{}"),
    ],
)
def test_constraints_go_to_the_wire_and_back(constraint: Constraint) -> None:
    sampling = SamplingParams(constraint=constraint)
    assert SamplingParams.from_proto(sampling.to_proto()) == sampling
    assert Constraint.from_proto(constraint.to_proto()) == constraint


def test_a_schema_is_text_a_mapping_or_a_class() -> None:
    assert Constraint(json="{}").to_proto().json_schema == "{}"
    assert Constraint(json=SCHEMA).to_proto().json_schema == json.dumps(SCHEMA)
    assert json.loads(Constraint(json=Capital).to_proto().json_schema) == Capital.model_json_schema()
    assert json.loads(Constraint(structural_tag={"format": {}}).to_proto().structural_tag) == {"format": {}}


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint(), "constraint has no kind: give one of json, "),
        (Constraint(regex="a", choice=("b",)), "constraint has regex and choice: give one of"),
        (Constraint(json=int), "constraint.json: int is not a class of pydantic's"),
        (Constraint(json=[1]), "constraint.json: a schema is text or a mapping, not list"),  # type: ignore[arg-type]
        (Constraint(json={"maximum": float("nan")}), "constraint.json: "),
        (Constraint(choice="yes"), "constraint.choice: choice is a text"),
        (Constraint(regex=1), "constraint.regex: "),  # type: ignore[arg-type]
    ],
)
def test_what_no_constraint_can_be_is_refused(constraint: Constraint, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        SamplingParams(constraint=constraint).to_proto()


def test_a_message_is_a_prompt_as_it_is() -> None:
    sent = pb.GenerateRequest(prompt="hi", truncate_prompt_tokens=3, sampling=pb.SamplingParams(max_tokens=4))
    made = generate_request(sent, None, {})
    assert made.request_id
    assert not sent.request_id
    made.ClearField("request_id")
    assert made == sent
    sent.request_id = "own"
    assert generate_request(sent, None, {}).request_id == "own"
    assert generate_request(sent, None, {"request_id": "r"}).request_id == "r"
    with pytest.raises(InvalidRequest, match="sampling is given beside a GenerateRequest"):
        generate_request(sent, SamplingParams(), {})
    with pytest.raises(InvalidRequest, match="suffix is given beside a GenerateRequest"):
        generate_request(sent, None, {"suffix": "a"})
