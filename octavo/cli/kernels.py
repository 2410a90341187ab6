"""`octavo bench kernels`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from octavo.cli.flags import JSON, parse_counts, resumable
from octavo.lab.flags import flag

if TYPE_CHECKING:
    from octavo.bench.tune.problem import Problem
    from octavo.bench.tune.tuner import Best, Tuner


class Tunable(StrEnum):
    FP8_GEMM = "fp8_gemm"
    MOE_GEMM = "moe_gemm"


class Scales(StrEnum):
    BLOCK = "block"
    CHANNEL = "channel"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFlags:
    """The flags as given."""

    tune: Tunable | None = flag(
        None, None, "The kernel whose fastest tile sizes are searched for and written to a file."
    )
    shape: list[str] | None = flag(
        None,
        None,
        "fp8_gemm: outputs and inputs of a linear layer. moe_gemm: experts of a rank, size of an expert, hidden size, "
        "experts of a token. May be given several times.",
        metavar="N,K|E,N,H,K",
    )
    scales: Scales = flag(
        Scales.BLOCK,
        None,
        "block: one per 128 x 128 weights and per 128 inputs of a token. channel: one per output channel and per "
        "token. none: bf16, for moe_gemm.",
    )
    batch_sizes: str = flag(
        "", None, "Batch sizes to tune for. Default: those of vLLM's files, from 1 to 4096.", metavar="M,M,..."
    )
    folder: Path | None = flag(
        None,
        None,
        "Where the files go. Default: where kernels look for them, $OCTAVO_TUNED_CONFIG_FOLDER or else fp8_gemm/ or "
        "moe_gemm/ in the cache directory.",
    )


def kernels(*, query: KernelFlags, as_json: JSON = False) -> None:
    """Tune kernels on all visible GPUs of this machine.

    It can be interrupted at any time: the same command continues where it stopped.

    Example: [bold]octavo bench kernels --tune fp8_gemm --shape 4096,7168 --shape 7168,2048[/]

    Example: [bold]octavo bench kernels --tune moe_gemm --shape 128,768,2048,8 --scales none[/]
    """
    if query.tune is None:
        raise typer.BadParameter(
            f"is needed: one of {', '.join(Tunable)}; `python -m benchmarks.gpu.run_all` in the repository "
            "measures all kernels",
            param_hint="--tune",
        )
    if not query.shape:
        raise typer.BadParameter(
            "is needed, such as 4096,7168; the logs of workers name the shapes that lack a file", param_hint="--shape"
        )

    shapes = [_problem(query.tune, text, query.scales) for text in query.shape]
    wanted = "numbers above 0, such as 1,16,256"
    sizes = parse_counts(query.batch_sizes, "--batch-sizes", wanted) if query.batch_sizes else None
    _tune(shapes, sizes, query.folder, as_json=as_json)


def _problem(tune: Tunable, text: str, scales: Scales) -> "Problem":
    """Raises typer.BadParameter."""
    from octavo.bench.tune.problem import ExpertsShape, Shape

    if tune is Tunable.FP8_GEMM:
        if scales is Scales.NONE:
            raise typer.BadParameter("none: fp8_gemm has scales: use block or channel", param_hint="--scales")
        N, K = parse_counts(text, "--shape", "two numbers above 0, such as 4096,7168", count=2)
        return Shape(N=N, K=K, blockwise=scales is Scales.BLOCK)
    if scales is Scales.CHANNEL:
        raise typer.BadParameter("channel: moe_gemm takes block, or none for bf16", param_hint="--scales")
    num_experts, size, hidden_size, top_k = parse_counts(
        text, "--shape", "four numbers above 0, such as 128,768,2048,8", count=4
    )
    if top_k > num_experts:
        raise typer.BadParameter(f"{text!r}: a token has {top_k} of {num_experts} experts", param_hint="--shape")
    return ExpertsShape(
        num_experts=num_experts, size=size, hidden_size=hidden_size, top_k=top_k, is_fp8=scales is Scales.BLOCK
    )


def _tune(shapes: "Sequence[Problem]", sizes: list[int] | None, folder: Path | None, *, as_json: bool) -> None:
    from kernels.native.cache_directory import cache_directory
    from kernels.triton_common.tuned_tiles import FOLDER_VARIABLE
    from octavo.bench.tune.gpu_process import GpuProcess, measured_with, visible_device
    from octavo.bench.tune.problem import BATCH_SIZES
    from octavo.bench.tune.tuner import Tuner
    from octavo.reports import print_json

    device = visible_device()
    in_environment = os.environ.get(FOLDER_VARIABLE)
    folder = folder or (Path(in_environment) if in_environment else cache_directory(shapes[0].op))
    folder.mkdir(parents=True, exist_ok=True)
    tuner = Tuner(device, folder, measured_with(device), GpuProcess)
    with resumable(folder):
        for shape in shapes:
            path = _tune_shape(tuner, shape, sizes or BATCH_SIZES, as_json=as_json)
            if as_json:
                print_json({"op": shape.op, **shape.sizes, "file": str(path)})


def _tune_shape(tuner: "Tuner", shape: "Problem", sizes: Sequence[int], *, as_json: bool) -> Path:
    from octavo.bench.tune.tuner import best_as_json, print_table, title_of
    from octavo.reports import print_json, progress_bar

    bests: list[Best] = []

    def on_best(best: "Best") -> None:
        bests.append(best)
        if as_json:
            print_json(best_as_json(best))

    total = tuner.num_candidates(shape, sizes)
    with progress_bar(title_of(shape), total, hidden=as_json) as advance:
        path = tuner.tune(shape, sizes, on_tries=advance, on_best=on_best)
    if not as_json:
        print_table(shape, bests, path)
    return path
