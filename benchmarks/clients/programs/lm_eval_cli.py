"""lm-eval's `local-completions`: the log-likelihoods of a task on disk, beside those of transformers.

`CASE.task` is the folder of the task, `CASE.scores` a log-likelihood for each of its lines.
"""

import json
import sys
import tempfile
from pathlib import Path

from report import CASE, check, report, run, same, trying

LM_EVAL = Path(sys.executable).with_name("lm-eval")
LIMIT = 1e-3


def main() -> None:
    for what, how in (
        ("prompts as token ids", "tokenized_requests=True"),
        ("prompts as text", "tokenized_requests=False"),
        ("token ids, 4 requests at once", "tokenized_requests=True,num_concurrent=4"),
    ):
        with trying(f"`local-completions`, {what}: log-likelihoods within {LIMIT} of transformers'"):
            compare(what, evaluate("octavo_scores", how))
    with trying("`local-completions`: generated text"):
        answers = [sample["filtered_resps"][0] for sample in evaluate("octavo_text", "tokenized_requests=True")]
        same(answers, [CASE.continuation] * len(answers))


def compare(what: str, samples: list[dict]) -> None:
    seen = {sample["doc"]["id"]: float(sample["filtered_resps"][0][0]) for sample in samples}
    check(set(seen) == set(range(len(CASE.scores))), f"{len(seen)} of {len(CASE.scores)} lines")
    furthest = max(abs(seen[line] - score) for line, score in enumerate(CASE.scores))
    check(furthest <= LIMIT, f"they differ by {furthest:.2g}")
    report(f"`local-completions`, {what}", "figure", f"at most {furthest:.2g} apart, {len(seen)} log-likelihoods")


def evaluate(task: str, how: str) -> list[dict]:
    """Returns lm-eval's samples."""
    arguments = f"model={CASE.model},base_url={CASE.url}/v1/completions,tokenizer={CASE.directory},{how}"
    with tempfile.TemporaryDirectory() as directory:
        run(
            *(LM_EVAL, "run", "--model", "local-completions", "--tasks", task, "--include_path", CASE.task),
            *("--model_args", f"{arguments},tokenizer_backend=huggingface,max_length=2048"),
            *("--output_path", directory, "--log_samples"),
            OPENAI_API_KEY=CASE.key,
            HF_HUB_OFFLINE="1",
            HF_DATASETS_CACHE=f"{directory}/datasets",
        )
        (path,) = Path(directory).rglob("samples_*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
