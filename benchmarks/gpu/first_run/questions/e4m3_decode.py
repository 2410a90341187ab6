"""Which tile reads an e4m3 cache fastest, and does reading it by pairs gain?

The tile that shipped until 2026-11-28, 128 tokens and 7 stages, was never timed. Of twelve others, 64 tokens, 5 stages
and 2 programs an SM was the fastest at all four shapes, by graphs (e4m3_decode_tiles.jsonl of 2026-11-26): 0.41 of a
copy. Predicted for pairs: 0.6 to 0.75.
"""

import torch

from benchmarks.gpu.first_run.questions._decodes import Decode, Make
from benchmarks.gpu.first_run.trees import STATES
from benchmarks.gpu.report import Report

OP = "e4m3_decode"
# Rows and tokens of context.
_SHAPES = ((1, 4096), (8, 4096), (64, 4096), (256, 512), (256, 1024))
# Tokens, stages, and programs an SM; None: the state's own choice.
_TILES = (None, (64, 5, 2), (64, 7, 2), (128, 5, 1), (128, 7, 2))
_SECONDS = 6.0


def run(report: Report, *, toy: bool) -> None:
    for batch, context in ((2, 40),) if toy else _SHAPES:
        if not report.has_time(_SECONDS):
            report.skip(OP, f"{batch} x {context}", "no time left")
            continue
        variants: dict[str, Make] = {}
        num_bytes = 0
        for tile in _TILES[:2] if toy else _TILES:
            for name in STATES:
                label = "own tile" if tile is None else "{} tokens, {} stages, {} programs".format(*tile)
                decode = Decode(
                    batch=batch,
                    context=context,
                    cache_dtype=torch.float8_e4m3fn,
                    device=report.device,
                    tile=tile,
                    toy=toy,
                )
                variants[f"{name}, {label}"] = decode.in_state(name)
                num_bytes = decode.kv_bytes
        report.compare(OP, f"{batch} x {context}", variants, dict.fromkeys(variants, num_bytes))
