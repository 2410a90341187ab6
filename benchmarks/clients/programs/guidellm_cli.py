"""guidellm's command: a few requests of each profile, and no request that fails."""

import json
import sys
import tempfile
from pathlib import Path

from report import CASE, check, run, trying

GUIDELLM = Path(sys.executable).with_name("guidellm")
# (what, profile, request format): a sweep has a synchronous, a throughput and one constant rate at least.
PROFILES = (
    ("`run`, concurrent, chats", "kind=concurrent,streams=4", "/v1/chat/completions"),
    ("`run`, concurrent, completions", "kind=concurrent,streams=4", "/v1/completions"),
    ("`run`, concurrent, responses", "kind=concurrent,streams=4", "/v1/responses"),
    ("`run`, sweep of 3, chats", "kind=sweep,sweep_size=3,max_concurrency=16", "/v1/chat/completions"),
)
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 32, 8


def main() -> None:
    for what, profile, request_format in PROFILES:
        with trying(what), tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "report.json"
            backend = f"kind=openai_http,target={CASE.url},model={CASE.model},api_key={CASE.key}"
            run(
                *(GUIDELLM, "run", "--backend", f"{backend},request_format={request_format}"),
                *("--profile", profile, "--constraint", "kind=max_requests,count=12"),
                *("--constraint", "kind=max_duration,seconds=20"),
                *("--tokenizer", f"kind=hf_auto,model={CASE.directory}"),
                *("--data", f"kind=synthetic_text,prompt_tokens={NUM_PROMPT_TOKENS},output_tokens={NUM_OUTPUT_TOKENS}"),
                *("--output", f"kind=json,path={path}", "--disable-console-interactive"),
                HF_HUB_OFFLINE="1",
            )
            judge(json.loads(path.read_text()))


def judge(report: dict) -> None:
    """Raises AssertionError unless requests were answered with as many tokens as asked for, and none failed."""
    for benchmark in report["benchmarks"]:
        requests = benchmark["requests"]
        check(
            requests["successful"] and not requests["errored"], [each.get("info") for each in requests["errored"]][:1]
        )
        counts = {each["output_metrics"]["text_tokens"] for each in requests["successful"]}
        check(counts == {NUM_OUTPUT_TOKENS}, f"output tokens: {counts}")


if __name__ == "__main__":
    main()
