"""Why does a bf16 decode of 34 GB reach 0.74 of a copy (by events) where 2 GB reach 0.88 to 1.02? And the chunk of v2.

A guess: 4 KiB pieces at random over 34 GB miss the TLB, which larger blocks would mend. Chunks of 256 tokens instead of
512 give a row of 512 tokens twice the programs: predicted -0.3 ms of 5.2 ms at batch 1.
"""

import torch

from benchmarks.gpu.first_run.questions._decodes import Decode
from benchmarks.gpu.report import Report

OP = "bf16_decode"
# Rows and tokens of context: 34 GB.
_LARGE = (64, 128 << 10)
_SECONDS = 8.0


def run(report: Report, *, toy: bool) -> None:
    batch, context = (2, 70) if toy else _LARGE
    whole = Decode(batch=batch, context=context, cache_dtype=torch.bfloat16, device=report.device, toy=toy)
    memory = torch.empty(whole.kv_bytes // 2 + (1 << 20), dtype=torch.bfloat16, device=report.device).normal_()
    decodes = {
        f"blocks of {block_size}": Decode(
            batch=batch,
            context=context,
            cache_dtype=torch.bfloat16,
            device=report.device,
            toy=toy,
            block_size=block_size,
            memory=memory,
        )
        for block_size in (16, 64, 128)
    }
    makes = {name: decode.in_state("now") for name, decode in decodes.items()}
    # Blocks of other sizes hold other keys in the same memory.
    report.compare(OP, f"{batch} x {context}", makes, dict.fromkeys(makes, whole.kv_bytes), same_results=False)
    del memory, decodes, makes
    for batch, context in ((2, 300),) if toy else ((1, 512), (1, 4096), (8, 4096), (256, 512)):
        if not report.has_time(_SECONDS):
            report.skip(OP, f"{batch} x {context}, chunks", "no time left")
            continue
        chunks = {
            f"chunks of {chunk}": Decode(
                batch=batch, context=context, cache_dtype=torch.bfloat16, device=report.device, toy=toy, chunk=chunk
            )
            for chunk in (512, 256)
        }
        makes = {name: decode.in_state("now") for name, decode in chunks.items()}
        num_bytes = {name: decode.kv_bytes for name, decode in chunks.items()}
        report.compare(OP, f"{batch} x {context}, chunks", makes, num_bytes)
