"""Checks of values that several fields share. Each error names the field, the value seen and what would work."""

from collections.abc import Sequence

from protos.inference_pb2 import ModelInfo
from router.errors import InvalidRequest, UnknownModel

# Tokens of one Tokenize or Detokenize; more than any model's output.
MAX_TOKENIZED = 2**20


def shown(text: str) -> str:
    """Returns a client's text as errors show it."""
    return repr(text if len(text) <= 140 else text[:140] + "...")


def check_model_name(name: str, served: str) -> None:
    """Raises UnknownModel."""
    if name and name != served:
        raise UnknownModel(f"model={shown(name)} is not served here: use {served!r}, or leave it empty")


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest."""
    if token_ids and max(token_ids) >= vocab_size:
        position, token_id = next((i, token_id) for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise InvalidRequest(f"{field}[{position}]={token_id}: token ids of this model are 0 to {vocab_size - 1}")


def check_num_chars(num_chars: int, longest_token: int, max_model_len: int) -> None:
    """Refuses a text that is too long however it is tokenized. longest_token: its characters. Raises InvalidRequest."""
    if num_chars > max_model_len * longest_token:
        raise InvalidRequest(
            f"the prompt has {num_chars} characters: "
            f"more than max_model_len={max_model_len} tokens however it is tokenized; shorten it"
        )


def check_prompt_length(num_prompt_tokens: int, model: ModelInfo) -> None:
    """Raises InvalidRequest."""
    if not num_prompt_tokens:
        raise InvalidRequest("the prompt is empty: give at least one token")
    if num_prompt_tokens >= model.max_model_len:
        raise InvalidRequest(
            f"the prompt has {num_prompt_tokens} tokens: use at most {model.max_model_len - 1}, so that with one "
            f"output token it fits max_model_len={model.max_model_len}"
        )


def check_detokenized(token_ids: Sequence[int]) -> None:
    """Raises InvalidRequest."""
    if len(token_ids) > MAX_TOKENIZED:
        raise InvalidRequest(f"token_ids has {len(token_ids)} entries: use at most {MAX_TOKENIZED}")
