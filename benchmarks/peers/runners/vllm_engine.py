"""vLLM's engine, run by the interpreter that install_vllm.sh makes (see engine_protocol.py).

    python vllm_engine.py MODEL_DIRECTORY '{"dtype": "bfloat16", ...}'

The second argument: keyword arguments of vllm.LLM.
"""
# pyright: reportMissingImports=false

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from engine_protocol import Outcome, Work, serve


def load() -> tuple[Mapping[str, Any], Callable[[Work], Outcome]]:
    # Imported here because importing vllm reads the environment and prints.
    from vllm import LLM, SamplingParams, TokensPrompt

    model, settings = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(model, skip_tokenizer_init=True, disable_log_stats=True, **settings)

    def run(work: Work) -> Outcome:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=work.output, min_tokens=work.output, ignore_eos=True, detokenize=False
        )
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in work.prompts]
        results = engine.generate(prompts, sampling, use_tqdm=False)
        return Outcome(sum(len(result.outputs[0].token_ids) for result in results))

    shown = {name: value for name, value in os.environ.items() if name.startswith("VLLM_CPU")}
    return {**settings, **shown}, run


if __name__ == "__main__":
    serve(load)
