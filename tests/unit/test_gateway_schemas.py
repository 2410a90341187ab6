"""What a body may hold, and what it costs to find out that it may not."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from router.gateway.schemas import ChatCompletionRequest, CompletionRequest


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 200_000 + ["a"]},
        {"prompt": [[1] * 200_000 + ["a"]]},
        {"prompt": ["a"] * 1000},
        {"prompt": [1] * (2**20 + 1)},
        {"prompt": "x", "stop": [1] * 200_000},
        {"prompt": "x", "stop_token_ids": ["a"] * 200_000},
        {"prompt": "x", "logit_bias": {f"a{number}": 1 for number in range(200_000)}},
        {"prompt": "x", "metadata": {f"a{number}": 1 for number in range(200_000)}},
        {"prompt": "x", **{f"a{number}": 1 for number in range(200_000)}},
        {"messages": [1] * 200_000},
        {"messages": [{"role": "user", "content": [1] * 200_000}]},
        {"messages": [], "tools": [1] * 200_000},
    ],
)
def test_a_body_that_is_wrong_everywhere_is_read_to_its_first_error(body: dict[str, Any]) -> None:
    schema = ChatCompletionRequest if "messages" in body else CompletionRequest
    with pytest.raises(ValidationError) as caught:
        schema.model_validate_json(json.dumps(body))
    assert caught.value.error_count() <= 4, "a kilobyte each is kept of all of them"
