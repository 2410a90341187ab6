"""Llama-3.1-8B with fp8 weights and KV: models.py."""

from benchmarks.gpu.end_to_end.shapes import TOY_VARIANTS, VARIANTS
from benchmarks.gpu.first_run.models import measure
from benchmarks.gpu.report import Report


def run(report: Report, *, toy: bool) -> None:
    measure(report, TOY_VARIANTS[-1] if toy else VARIANTS[-1], toy=toy)
