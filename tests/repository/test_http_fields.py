"""docs/http.md tells of every field of the HTTP requests, vLLM's among them."""

import re

import pytest

from router.api.gateway.anthropic.schemas import MessagesRequest
from router.api.gateway.openai.fields import Effect
from router.api.gateway.openai.schemas import ChatCompletionRequest, CompletionRequest
from tests.support.repository import ROOT

# Fields of the requests of vLLM 0.33 (vllm/entrypoints/openai/*/protocol.py).
_BOTH = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options
    temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens response_format structured_outputs priority request_id session_id return_tokens_as_token_ids
    return_token_ids return_weight_versions routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs
    cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget
    stream_interval
"""
_COMPLETION = "prompt suffix prompt_embeds"
_CHAT = """
    messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning parallel_tool_calls
    add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
    mm_processor_kwargs return_prompt_text
"""
SCHEMAS = {
    schema: set(re.findall(r"\w+", names))
    for schema, names in ((CompletionRequest, _BOTH + _COMPLETION), (ChatCompletionRequest, _BOTH + _CHAT))
}
each_schema = pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)


def section(title: str) -> str:
    text = (ROOT / "docs" / "http.md").read_text()
    begin = text.index(f"## {title}\n")
    return text[begin : text.index("\n## " if title.startswith("Refused") else "\n### ", begin)]


@each_schema
def test_vllms_fields_are_known(schema: type[CompletionRequest | ChatCompletionRequest]) -> None:
    assert SCHEMAS[schema] <= schema.model_fields.keys()


@each_schema
def test_each_field_is_told(schema: type[CompletionRequest | ChatCompletionRequest]) -> None:
    honoured = set(re.findall(r"`(\w+)`", section("Honoured fields")))
    for name, field in schema.model_fields.items():
        effects = [each for each in field.metadata if isinstance(each, Effect)]
        if not effects:
            assert name in honoured, name
            continue
        (effect,) = effects
        table = section("Refused fields" if effect.is_refused else "Fields without effect")
        rows = [row for row in table.splitlines() if f"`{name}`" in row]
        assert len(rows) == 1, name
        assert rows[0].endswith(f"| {effect.says} |")


def test_each_field_of_anthropics_is_told() -> None:
    text = (ROOT / "docs" / "http.md").read_text()
    table = text[text.index("## Anthropic's API\n") : text.index("\n## Responses\n")]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    for name, field in MessagesRequest.model_fields.items():
        (told,) = (told for names, told in rows if f"`{name}`" in names)
        for effect in field.metadata:
            if isinstance(effect, Effect):
                assert told.strip() == f"{'refused' if effect.is_refused else 'no effect'}: {effect.says}"
