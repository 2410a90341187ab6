"""Batched generate() of transformers, run by Octavo's interpreter, which has it (see engine_protocol.py).

    python transformers_engine.py MODEL_DIRECTORY '{"dtype": "bfloat16", "threads": 2}'

The prompts of a batch are equally long; nothing is shared between them.
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from engine_protocol import Outcome, Work, serve
from transformers import AutoModelForCausalLM


def load() -> tuple[Mapping[str, Any], Callable[[Work], Outcome]]:
    path, settings = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(settings["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, settings["dtype"]))
    model.eval()

    def run(work: Work) -> Outcome:
        prompts = torch.tensor(work.prompts)
        with torch.inference_mode():
            generated = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=work.output,
                min_new_tokens=work.output,
                do_sample=False,
                pad_token_id=0,
            )
        return Outcome(generated.numel() - prompts.numel())

    return {**settings, "attention": model.config._attn_implementation}, run


if __name__ == "__main__":
    serve(load)
