"""Runs Octavo's engine: scheduling core and worker in one process (see engine_protocol.py).

    python octavo_engine.py '{"dtype": "bfloat16", "worker_threads": 2}'

The argument: options of Octavo.
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from engine_protocol import Outcome, Work, serve

from configs.options import Options
from octavo.local.engine import Engine, build_engine
from protos import inference_pb2 as pb


class Load:
    """Sends requests to one engine, under new group numbers each time."""

    def __init__(self, options: Options) -> None:
        self._engine: Engine = build_engine(options)
        self._count = 0

    def run(self, work: Work) -> Outcome:
        sampling = pb.SamplingParams(
            temperature=0.0,
            top_p=1.0,
            repetition_penalty=1.0,
            n=1,
            ignore_eos=True,
            max_tokens=work.output,
            min_tokens=work.output,
        )
        for prompt in work.prompts:
            self._count += 1
            self._engine.submit(self._count, prompt, sampling)
        computed = tokens = 0
        while self._engine.has_work:
            step = self._engine.step()
            # None only while images are prepared, and there are none.
            assert step.plan is not None
            computed += step.plan.num_tokens
            tokens += sum(len(sequence.token_ids) for sequence in step.sequences)
        # The last token of each request is sampled but not computed.
        return Outcome(tokens, extra={"prompt_tokens_computed": computed - (tokens - len(work.prompts))})


def load() -> tuple[Mapping[str, Any], Callable[[Work], Outcome]]:
    settings = json.loads(sys.argv[1])
    return settings, Load(Options(**settings)).run


if __name__ == "__main__":
    serve(load)
