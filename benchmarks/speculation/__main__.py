"""Compares generation with speculation to generation without, workload by workload, in one run.

    python -m benchmarks.speculation                                          method auto, at 1 to 64 streams
    python -m benchmarks.speculation --methods auto,ngram,suffix --streams 1,8
    python -m benchmarks.speculation --methods draft_model --model same --quantization int4
    python -m benchmarks.speculation --pair --methods auto,suffix,draft_model --streams 1,4 --prompts 16 --max-tokens 96
    python -m benchmarks.speculation --temperature 1                          drawn tokens instead of the likeliest
    python -m benchmarks.speculation --smoke                                  all of it runs; the figures mean nothing
    --json: a line of JSON for each figure. --config '{"method": ...}': any speculative_config as one more method.

SmolLM2-135M in bfloat16 on the CPU, in this process; with --pair Qwen2.5-Coder 1.5B, both models in int4 (pair.py; it
downloads 1.6 GB). workloads.py has the prompts. One engine generates without speculation, and one with each method;
none has a prefix cache. In a round each engine computes the same requests, two a stream: one begins when one ends.
The engines take turns of a tenth of a second, so that all of them meet the same machine; rounds begin with different
engines. A ratio is that of a method to no speculation in the same round. Outputs must be equal: if one differs, the run
fails. Prints for each workload, method and number of streams, as medians of the rounds, over the time in which all
streams are busy:

- tok_s, tok_s_off, ratio: output tokens a second with and without, prompts included.
- acceptance: accepted drafts of those verified. drafts_a_step: verified drafts; tokens_a_step: output tokens.
- scheduler_us, scheduler_us_off: the scheduler's time a step, drafter included. step_ms, step_ms_off: the whole step.
- copied: share of the outputs that is in 6-grams of the prompt. loops: share of outputs that end in a loop.
  Loops flatter acceptance: `no_loops` has the figures of requests without them, if any has one.

Then the time of steps by their tokens, which is what verification costs. About 25 minutes a method.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.command import names, numbers, show
from benchmarks.speculation.pair import fetch
from benchmarks.speculation.turns import Method, Turn, Workbench
from benchmarks.speculation.workloads import (
    MAX_TOKENS,
    MODEL,
    NUM_PROMPTS,
    Workload,
    copied_share,
    loop_length,
    workloads,
)

_STREAMS = (1, 2, 4, 8, 16, 32, 64)
# Requests of a turn. A stream alone is short: so many, one after the other.
_REQUESTS_A_STREAM, _LEAST_REQUESTS = 2, 4
OFF = "off"
_PAIR_MODEL_LEN = 2048


class Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._methods = _methods(arguments)
        self._model: dict[str, Any] = {"model": MODEL}
        if arguments.pair:
            self._model = {"model": str(fetch()[0]), "quantization": "int4", "max_model_len": _PAIR_MODEL_LEN}
        self._bench = Workbench(
            self._methods, model=self._model, threads=arguments.threads, temperature=arguments.temperature
        )

    def measure(self, workload: Workload) -> None:
        prompts = workload.prompts(self._model["model"])[: self._arguments.prompts]
        # Warms all engines up; and the outputs are those of every turn.
        outputs = self._bench.turn(OFF, workload, prompts, list(range(len(prompts))), len(prompts)).outputs
        known = dict(enumerate(outputs))
        for method in self._methods:
            self._bench.turn(method.name, workload, prompts, list(range(min(8, len(prompts)))), 8)
        looping = {index for index, output in known.items() if loop_length(output)}
        copied = statistics.mean(copied_share(prompts[index], output) for index, output in known.items())
        about: dict[str, object] = {"copied": round(copied, 3), "loops": round(len(looping) / len(prompts), 3)}
        choices = {"all": list(known)}
        if looping:
            choices["no_loops"] = [index for index in known if index not in looping]
        choices = {name: indices for name, indices in choices.items() if name in self._arguments.requests}
        for streams in self._arguments.streams:
            for requests, indices in choices.items():
                if streams <= len(indices):
                    found = self._rounds(workload, prompts, indices, streams, known)
                    self._show(found, {"workload": workload.name, "streams": streams, "requests": requests}, about)

    def _rounds(
        self,
        workload: Workload,
        prompts: Sequence[Sequence[int]],
        indices: Sequence[int],
        streams: int,
        known: dict[int, list[int]],
    ) -> dict[str, list[Turn]]:
        names = [OFF, *(method.name for method in self._methods)]
        found: dict[str, list[Turn]] = {name: [] for name in names}
        count = max(_REQUESTS_A_STREAM * streams, _LEAST_REQUESTS)
        for number in range(self._arguments.rounds):
            chosen = [indices[(number * count + i) % len(indices)] for i in range(count)]
            order = names[number % len(names) :] + names[: number % len(names)]
            for name, turn in self._bench.turns(order, workload, prompts, chosen, streams).items():
                if turn.outputs != [known[index] for index in chosen]:
                    raise SystemExit(f"{workload.name}: an output of {name} at {streams} streams differs")
                found[name].append(turn)
        return found

    def _show(self, found: dict[str, list[Turn]], what: dict[str, object], about: dict[str, object]) -> None:
        off = found[OFF]
        for method in self._methods:
            turns = found[method.name]
            ratios = [turn.rate / other.rate for turn, other in zip(turns, off, strict=True)]
            num_drafts = sum(turn.num_draft_tokens for turn in turns)
            num_steps = sum(turn.num_steps for turn in turns)
            self._print(
                {
                    **what,
                    "method": method.name,
                    "tok_s": round(statistics.median(turn.rate for turn in turns), 1),
                    "tok_s_off": round(statistics.median(turn.rate for turn in off), 1),
                    "ratio": round(statistics.median(ratios), 3),
                    "ratios": [round(each, 3) for each in ratios],
                    "acceptance": round(sum(turn.num_accepted for turn in turns) / max(1, num_drafts), 3),
                    "drafts_a_step": round(num_drafts / num_steps, 2),
                    "tokens_a_step": round(sum(turn.num_tokens for turn in turns) / num_steps, 2),
                    "scheduler_us": _median_of_steps(turns, "scheduling", 1e6),
                    "scheduler_us_off": _median_of_steps(off, "scheduling", 1e6),
                    "step_ms": _median_of_steps(turns, "computing", 1e3),
                    "step_ms_off": _median_of_steps(off, "computing", 1e3),
                    **about,
                }
            )

    def show_steps(self) -> None:
        for name, by_tokens in self._bench.step_times.items():
            medians = {tokens: round(statistics.median(times) * 1e3, 2) for tokens, times in sorted(by_tokens.items())}
            self._print({"method": name, "step_ms_by_tokens": medians})

    def _print(self, values: dict[str, object]) -> None:
        show({"temperature": self._arguments.temperature, **values}, as_json=self._arguments.json)


def _median_of_steps(turns: Sequence[Turn], part: str, factor: float) -> float:
    return round(statistics.median(getattr(turn, part) / turn.num_steps for turn in turns) * factor, 1)


def _methods(arguments: argparse.Namespace) -> list[Method]:
    more = {"model": str(fetch()[1]), "quantization": "int4"} if arguments.pair else {}
    more |= {name: getattr(arguments, name) for name in ("model", "quantization") if getattr(arguments, name)}
    if arguments.num_speculative_tokens:
        more["num_speculative_tokens"] = arguments.num_speculative_tokens
    # ngram and suffix draft from tokens alone.
    of_workers = ("model", "quantization")
    found = [
        Method(
            name,
            {"method": name}
            | {key: value for key, value in more.items() if name not in ("ngram", "suffix") or key not in of_workers},
        )
        for name in arguments.methods
    ]
    return [*found, *(Method(text, json.loads(text)) for text in arguments.config)]


def _names(text: str) -> list[str]:
    return [each for each in text.split(",") if each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads", type=names(*MAX_TOKENS), default=",".join(MAX_TOKENS), help="default: %(default)s"
    )
    parser.add_argument("--methods", "--method", type=_names, default="auto", help="default: %(default)s")
    parser.add_argument("--model", default="", help="of the drafts; same: SmolLM2's own weights")
    parser.add_argument("--quantization", default="", help="of the draft model")
    parser.add_argument("--num-speculative-tokens", type=int, default=0)
    parser.add_argument("--config", action="append", default=[], help="a speculative_config; may come several times")
    parser.add_argument("--streams", type=numbers, default=list(_STREAMS))
    parser.add_argument("--pair", action="store_true", help="a real pair of models instead of SmolLM2")
    parser.add_argument(
        "--requests", type=_names, default="all,no_loops", help="no_loops: those whose outputs end in no loop"
    )
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="only so many of a workload's prompts")
    parser.add_argument("--max-tokens", type=int, default=max(MAX_TOKENS.values()), help="upper bound of an output")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2, help="compute threads")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per median")
    parser.add_argument("--smoke", action="store_true", help="outputs of 16 tokens, at 1 and 8 streams, 1 round")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.streams, arguments.rounds, arguments.max_tokens = [1, 8], 1, 16
    run = Run(arguments)
    for name in arguments.workloads:
        workload = workloads()[name].short(arguments.max_tokens)
        print(f"{name}: {arguments.prompts} prompts", file=sys.stderr)
        run.measure(workload)
    run.show_steps()


if __name__ == "__main__":
    main()
