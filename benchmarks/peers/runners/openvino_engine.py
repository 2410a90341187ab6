"""OpenVINO GenAI's continuous batching, run by the interpreter that install_openvino.sh makes (see engine_protocol.py).

    python openvino_engine.py MODEL.gguf '{"max_num_batched_tokens": 2048, ...}'

The second argument: fields of SchedulerConfig, and under "properties" those of the CPU plugin.
"""
# pyright: reportMissingImports=false

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import openvino
import openvino_genai
from engine_protocol import Outcome, Work, serve


def load() -> tuple[Mapping[str, Any], Callable[[Work], Outcome]]:
    model, settings = sys.argv[1], json.loads(sys.argv[2])
    properties = settings.pop("properties", {})
    scheduler = openvino_genai.SchedulerConfig()
    for name, value in settings.items():
        setattr(scheduler, name, value)
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def run(work: Work) -> Outcome:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=work.output, min_new_tokens=work.output, ignore_eos=True, do_sample=False
        )
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in work.prompts]
        results = pipeline.generate(prompts, [config] * len(prompts))
        return Outcome(sum(len(result.m_generation_ids[0]) for result in results))

    return {"openvino": openvino.__version__, **settings, **properties}, run


if __name__ == "__main__":
    serve(load)
