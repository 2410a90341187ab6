"""Measures what quantization and an e4m3 KV cache cost: the perplexity of a text, and how often the most likely token
stays the same.

    python -m benchmarks.engine.perplexity [--quantization none,int8,int4] [--dtype bfloat16] [--tokens 55296] [--json]
    python -m benchmarks.engine.perplexity --quantization none --kv-cache-dtype auto,fp8

Scheduling core and worker run in one process, and as in serving: paged KV, chunked prefill, batched rows. The text is
cut into windows that do not overlap; each is a prompt of its own, and prompt logprobs score each of its tokens but the
first. So perplexity = exp(-mean logprob) over (window - 1) tokens a window. For each quantization, in one run:
- perplexity, its ratio to that of the first run (of the first values named), and the ratio's standard
  error (from the windows' ratios: both score the same tokens, so most of what differs between windows cancels);
- argmax_agreement: positions of the text where both find the same token most likely;
- greedy, unless --prompts 0: free-running greedy outputs after prompts from the text. Mean length of the prefix that
  both outputs share, and the fraction of outputs that are equal to the end.
"""

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.options import Options
from octavo.local.engine import Engine, build_engine
from protos import inference_pb2 as pb
from router.text.tokenizer import Tokenizer
from runtime.model_files import resolve_model
from runtime.tokenizer.files import tokenizer_directory

TEXT = Path(__file__).parents[1] / "data" / "sherlock_holmes.txt"
WINDOW, TOKENS = 2048, 27 * 2048
# Less than a window: a step ends one prefill and begins the next, as in serving.
BUDGET = 1536
PROMPT, OUTPUT = 128, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of W windows of L tokens each; a window's first token has none."""

    logprobs_WL: np.ndarray  # float64 [W, L - 1], of the tokens that the text has
    likeliest_WL: np.ndarray  # int64 [W, L - 1]

    @property
    def perplexity(self) -> float:
        return float(np.exp(-self.logprobs_WL.mean()))

    def ratio_to(self, other: "Scores") -> tuple[float, float]:
        """Ratio of the perplexities over the same tokens, and its standard error."""
        differences_W = (other.logprobs_WL - self.logprobs_WL).mean(axis=1)
        ratio = float(np.exp(differences_W.mean()))
        spread = differences_W.std(ddof=1) if len(differences_W) > 1 else np.nan
        return ratio, ratio * float(spread) / len(differences_W) ** 0.5

    def agreement_with(self, other: "Scores") -> float:
        return float((self.likeliest_WL == other.likeliest_WL).mean())


def text_tokens(model: str, path: Path = TEXT) -> list[int]:
    """Tokenizes the whole text for a model (configs.options, `model`)."""
    return Tokenizer(tokenizer_directory(resolve_model(model))).encode(path.read_text(encoding="utf-8"))


def windows(token_ids: Sequence[int], length: int, limit: int) -> list[list[int]]:
    """Cuts the first `limit` tokens, or all if fewer, into windows; drops a last one that is shorter than `length`."""
    limit = min(limit, len(token_ids))
    return [list(token_ids[start : start + length]) for start in range(0, limit - length + 1, length)]


def quality_engine(**options: object) -> Engine:
    """Builds an engine with the memory and the step size that these measurements need."""
    defaults = {"max_model_len": WINDOW + 1, "max_num_batched_tokens": BUDGET, "kv_cache_memory": 1.0}
    return build_engine(Options.model_validate(defaults | options))


def score(engine: Engine, prompts: Sequence[Sequence[int]]) -> Scores:
    """Scores prompts of one length, all computed together. Group numbers from 0 on must be unused in the engine."""
    sampling = pb.SamplingParams(
        temperature=0.0, top_p=1.0, repetition_penalty=1.0, n=1, max_tokens=1, prompt_logprobs=1
    )
    length = len(prompts[0])
    logprobs_WL = np.full((len(prompts), length - 1), np.nan)
    likeliest_WL = np.zeros((len(prompts), length - 1), dtype=np.int64)
    for group, prompt in enumerate(prompts):
        engine.submit(group, prompt, sampling)
    while engine.has_work:
        for (group, _), frame in engine.step().prompt_logprobs:
            for index, entry in enumerate(frame.logprobs, frame.first_position - 1):
                logprobs_WL[group, index] = entry.chosen.logprob
                likeliest_WL[group, index] = entry.top[0].token_id
    assert not np.isnan(logprobs_WL).any(), "a position of a prompt was not scored"
    return Scores(logprobs_WL=logprobs_WL, likeliest_WL=likeliest_WL)


def greedy(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, first_group: int) -> list[list[int]]:
    """Greedy outputs of exactly `num_tokens` tokens, all prompts computed together."""
    sampling = pb.SamplingParams(
        temperature=0.0,
        top_p=1.0,
        repetition_penalty=1.0,
        n=1,
        max_tokens=num_tokens,
        min_tokens=num_tokens,
        ignore_eos=True,
    )
    outputs: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.submit(first_group + index, prompt, sampling)
    while engine.has_work:
        for sequence in engine.step().sequences:
            outputs[sequence.key[0] - first_group] += sequence.token_ids
    return outputs


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens before two outputs of one length diverge."""
    parted = np.flatnonzero(np.asarray(first) != np.asarray(second))
    return int(parted[0]) if len(parted) else len(first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quantization", default="none,int8,int4", help="comma-separated; the first is the base of the comparisons"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", help="comma-separated; float32,bfloat16 shows what bfloat16 costs"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="comma-separated: auto, fp8")
    parser.add_argument("--model", default=Options.model_fields["model"].default)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of the text, at most")
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--prompts", type=int, default=64, help="number of greedy outputs; 0: none")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    token_ids = text_tokens(arguments.model, arguments.text)
    cut = windows(token_ids, arguments.window, arguments.tokens)
    if not cut:
        parser.error(f"--window {arguments.window}: the {min(len(token_ids), arguments.tokens)} tokens fill no window")
    starts = np.linspace(0, len(token_ids) - PROMPT, arguments.prompts).astype(int).tolist()
    prompts = [token_ids[start : start + PROMPT] for start in starts]
    base: tuple[Scores, list[list[int]]] | None = None
    kinds = (each.split(",") for each in (arguments.dtype, arguments.quantization, arguments.kv_cache_dtype))
    for dtype, quantization, kv_cache_dtype in itertools.product(*kinds):
        start = time.perf_counter()
        engine = quality_engine(
            model=arguments.model,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            worker_threads=arguments.threads,
            max_model_len=max(arguments.window, PROMPT + OUTPUT) + 1,
        )
        scores = score(engine, cut)
        outputs = greedy(engine, prompts, OUTPUT, first_group=len(cut))
        # Frees weights and KV cache before the next engine is built.
        del engine
        base = base or (scores, outputs)
        ratio, error = scores.ratio_to(base[0])
        figures: dict[str, float] = {
            "tokens_scored": scores.logprobs_WL.size,
            "perplexity": scores.perplexity,
            "ratio": ratio,
            "ratio_error": error,
            "argmax_agreement": scores.agreement_with(base[0]),
        }
        if prompts:
            shared = [shared_prefix(ours, theirs) for ours, theirs in zip(outputs, base[1], strict=True)]
            figures["greedy_shared_prefix"] = float(np.mean(shared))
            figures["greedy_equal"] = float(np.mean([length == OUTPUT for length in shared]))
        figures["seconds"] = time.perf_counter() - start
        rounded = {name: round(value, 4) for name, value in figures.items()}
        if arguments.json:
            kind = {"quantization": quantization, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
            print(json.dumps(kind | rounded), flush=True)
        else:
            shown = "  ".join(f"{name} {value:g}" for name, value in rounded.items())
            print(f"{dtype} {quantization:<6} KV {kv_cache_dtype}", shown, flush=True)


if __name__ == "__main__":
    main()
