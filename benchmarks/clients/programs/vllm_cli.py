"""vLLM's load generator, `vllm bench serve`."""

import json
import sys
import tempfile
from pathlib import Path

from report import CASE, run, same, trying

VLLM = Path(sys.executable).with_name("vllm")
NUM_REQUESTS, NUM_OUTPUT_TOKENS = 12, 8
BACKENDS = {
    "openai-chat": "/v1/chat/completions",
    "openai": "/v1/completions",
}


def main() -> None:
    for backend, endpoint in BACKENDS.items():
        with trying(f"`bench serve`, backend `{backend}`"), tempfile.TemporaryDirectory() as directory:
            run(
                *(VLLM, "bench", "serve", "--backend", backend, "--base-url", CASE.url, "--endpoint", endpoint),
                *("--model", CASE.directory, "--served-model-name", CASE.model, "--tokenizer", CASE.directory),
                *("--dataset-name", "random", "--random-input-len", 32, "--random-output-len", NUM_OUTPUT_TOKENS),
                *("--num-prompts", NUM_REQUESTS, "--max-concurrency", 4, "--ignore-eos", "--disable-tqdm"),
                *("--save-result", "--result-dir", directory, "--result-filename", "result.json"),
                OPENAI_API_KEY=CASE.key,
                HF_HUB_OFFLINE="1",
            )
            result = json.loads((Path(directory) / "result.json").read_text())
            same((result["completed"], result["failed"]), (NUM_REQUESTS, 0))
            same(result["total_output_tokens"], NUM_REQUESTS * NUM_OUTPUT_TOKENS)


if __name__ == "__main__":
    main()
