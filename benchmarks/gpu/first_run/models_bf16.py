"""Llama-3.1-8B in bf16: models.py."""

from benchmarks.gpu.end_to_end.shapes import TOY_VARIANTS, VARIANTS
from benchmarks.gpu.first_run.models import measure
from benchmarks.gpu.report import Report


def run(report: Report, *, toy: bool) -> None:
    measure(report, TOY_VARIANTS[0] if toy else VARIANTS[1], toy=toy)
