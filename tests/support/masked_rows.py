"""Constraints and samplings of rows whose masks are tested, on CPUs and GPUs."""

from typing import Any

from protos.inference_pb2 import ReasoningMarks
from scheduler.core.messages import CoreSettings
from tests.fakes.fake_model import POISON
from tests.support.text_choices import choice

EOS = 2
TEXTS = choice("the quick brown fox", "the quiet brown bear", "abcabcabc", "abba", "zzz")
# Longer than a step may force.
LONG = choice("c" + "defghijklmnopqrstuvwxyz" * 2)
# A row with POISON in its output fails.
PLAIN = {"max_tokens": 30, "ignore_eos": True, "logit_bias": {POISON: -100.0}}
# Four tokens that end the reasoning.
END = [9, 35, 35, 35]
MARKS = ReasoningMarks(is_open=True, ends=["zzz"], end_token_ids=END)
THINKING = {"thinking_token_budget": 6, "reasoning_marks": MARKS}


def settings(steps: int = 1, **changes: Any) -> CoreSettings:
    fields: dict[str, Any] = {
        "block_size": 8,
        "num_blocks": 64,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return CoreSettings(max_steps_in_flight=steps, eos_token_ids=frozenset({EOS}), **(fields | changes))
