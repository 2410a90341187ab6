"""Lines of batches, good and bad ones, with their outcomes."""

import json
from typing import Any

HOST = "127.0.0.1"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(custom_id: Any, url: str = COMPLETIONS, **body: Any) -> str:
    fields = {"prompt": "Once upon", "max_tokens": 5, "seed": 1}
    if url == CHAT:
        fields = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "seed": 1}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields | body})


# Each with the status, or the code of the error, that its output line has.
LINES: tuple[tuple[str, int | str], ...] = (
    (line("a"), 200),
    ("{", "invalid_json_line"),
    (line("b", CHAT), 200),
    ("", 0),
    ("[1]", "invalid_json_line"),
    (json.dumps({"method": "POST", "url": CHAT, "body": {}}), "invalid_custom_id"),
    (line("a", seed=2), "duplicate_custom_id"),
    (line("c", "/v1/embeddings"), "invalid_url"),
    (line("d", temperature=-1), 400),
    (line("e", model="nonesuch"), 404),
    (line("f", stream=True), "invalid_body"),
    (json.dumps({"custom_id": "g", "method": "GET", "url": CHAT, "body": {}}), "invalid_method"),
    (json.dumps({"custom_id": "h", "method": "POST", "url": CHAT}), "invalid_body"),
    (line(7), "invalid_custom_id"),
    (line("z" * 600), "invalid_custom_id"),
    ("[" * 100_000, "invalid_json_line"),
    (line("é\u2028", CHAT), 200),
    (line("last"), 200),
)
