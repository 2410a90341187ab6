"""Formats are guessed from chat templates: here from the lines of public templates that show calls and reasoning."""

from typing import get_args

import pytest

from configs.groups.router import ReasoningParser, ToolCallParser
from router.parsing.families import TOOL_FORMATS, guess_reasoning_parser, guess_tool_call_parser
from router.parsing.parser import HARMONY_REASONING
from router.parsing.reasoning import REASONING_FORMATS

TEMPLATES = {
    # Qwen/Qwen2.5-7B-Instruct
    "qwen2.5": (
        r"""'\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- '}\n</tool_call>' }}""",
        "hermes",
        "",
    ),
    # Qwen/Qwen3-8B
    "qwen3": (
        r"""{{- '<|im_start|>' + message.role + '\n<think>\n' + '\n</think>\n\n' }}
        {{- '<tool_call>\n{"name": "' }}{{- '", "arguments": ' }}{{- '}\n</tool_call>' }}""",
        "hermes",
        "qwen3",
    ),
    # Qwen/Qwen3-Coder-30B-A3B-Instruct
    "qwen3-coder": (
        r"""<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>""",
        "qwen3_coder",
        "",
    ),
    # NousResearch/Hermes-3-Llama-3.1-8B
    "hermes-3": (
        r"""'{"name": <function-name>, "arguments": <args-dict>}' within <tool_call></tool_call> <|im_start|>""",
        "hermes",
        "",
    ),
    # meta-llama/Llama-3.1-8B-Instruct
    "llama-3.1": (
        r"""{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- "<|python_tag|>" + tool_call.name }}""",
        "llama3_json",
        "",
    ),
    # meta-llama/Llama-3.2-1B-Instruct in the pythonic form of Meta's prompt format
    "llama-3.2-pythonic": (
        r"""{{- "[func_name1(params_name1=params_value1, params_name2=params_value2...)]\n" }}<|start_header_id|>""",
        "pythonic",
        "",
    ),
    # meta-llama/Llama-4-Scout-17B-16E-Instruct
    "llama-4": (r"""<|header_start|>system [func_name1(params_name1=params_value1)]""", "llama4_pythonic", ""),
    # mistralai/Mistral-Small-3.1-24B-Instruct-2503, Magistral-Small-2509
    "mistral-small": (r"""{{- "[TOOL_CALLS][" }}{{- '{"name": "' + name + '", "arguments": ' }}""", "mistral", ""),
    "magistral": (r"""[THINK]' + text + '[/THINK]' ... '[TOOL_CALLS]' + name + '[ARGS]'""", "mistral", "mistral"),
    # deepseek-ai/DeepSeek-R1-0528, V3-0324, V3.1
    "deepseek-r1": (
        r"""'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '\n' + '```json'
        {{'<｜Assistant｜><think>\n'}} content.split('</think>')""",
        "deepseek_v3",
        "deepseek_r1",
    ),
    "deepseek-v3": (r"""{{'<｜Assistant｜><｜tool▁calls▁begin｜>' + '\n' + '```json' + '\n'}}""", "deepseek_v3", ""),
    "deepseek-v3.1": (
        r"""{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>'}}{{'<｜Assistant｜></think>'}}""",
        "deepseek_v31",
        "deepseek_r1",
    ),
    # google/functiongemma-270m-it, gemma-4; vLLM's template for Gemma 3
    "functiongemma": ("{{- '<start_function_call>call:' + name + '{' }}", "functiongemma", ""),
    "gemma-4": (
        """{{- '<|tool_call>call:' + name + '{' }} <|"|> {{ '<|channel>thought\n' + '\n<channel|>' }}""",
        "gemma4",
        "gemma4",
    ),
    "gemma-3": ("Example Format: [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic", ""),
    # ibm-granite/granite-3.2-8b-instruct, granite-4.0
    "granite-3.2": (
        """<|start_of_role|>system<|end_of_role|> respond with <|tool_call|> followed by a JSON list of tools used.
        after 'Here is my thought process:' and write your response after 'Here is my response:'""",
        "granite",
        "granite",
    ),
    "granite-4": (
        r"""<|start_of_role|> within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>""",
        "granite4",
        "",
    ),
    # microsoft/Phi-4-mini-instruct, and vLLM's template for it
    "phi-4-mini": (
        "{{ '<|' + message['role'] + '|>' + '<|tool|>' + message['tools'] + '<|/tool|>' }}",
        "phi4_mini_json",
        "",
    ),
    "phi-4-mini-functools": ("prefix function calls with functools marker", "phi4_mini_json", ""),
    # openai/gpt-oss-20b
    "gpt-oss": (
        '{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}',
        "openai",
        "openai_gptoss",
    ),
    # HuggingFaceTB/SmolLM2-135M-Instruct, and ChatML: no calls.
    "smollm2": ("{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}", "", ""),
}


@pytest.mark.parametrize("model", TEMPLATES)
def test_a_template_says_its_formats(model):
    template, calls, reasoning = TEMPLATES[model]
    assert guess_tool_call_parser(template) == calls
    assert guess_reasoning_parser(template) == reasoning


def test_every_format_can_be_guessed():
    assert {calls for _, calls, _ in TEMPLATES.values()} == {*TOOL_FORMATS, ""}
    assert {reasoning for _, _, reasoning in TEMPLATES.values()} == {*REASONING_FORMATS, HARMONY_REASONING, ""}


def test_the_options_know_every_format():
    assert set(get_args(ToolCallParser)) == {*TOOL_FORMATS, "auto", "none"}
    assert set(get_args(ReasoningParser)) == {*REASONING_FORMATS, HARMONY_REASONING, "auto", "none"}
