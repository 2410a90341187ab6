"""Checks every decoder that model_impl=transformers takes against transformers, and writes the table of models.

    python -m benchmarks.engine.library.grid [--only TYPE,...] [--head-dim 16] [--tensor-parallel] [--json]
                                             [--page docs/models.md]

A tiny random model with odd sizes of each class, in float32: logits of a prompt, 64 greedy tokens, and the bits of the
logits in chunks, beside other requests, behind a cached prefix, and computed again as after a preemption. With
--tensor-parallel, real schedulers and workers also run each model on one rank and, where it has a plan, on two, with so
few blocks that sequences are preempted. Exits 1 if an error is above 1e-4 or anything differs. Takes half a minute
without, and 10 minutes with --tensor-parallel on one core.
"""

import argparse
import json
import logging
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import transformers

from benchmarks.engine.library.page import write_page
from kernels.shard import Shard
from tests.support.models.layouts import NUM_SAID, Layout, run_layout
from tests.support.models.library_checks import check, load
from tests.support.models.library_models import SIZES, decoder_classes, default_config, tiny_config, tiny_model, write
from tests.support.models.rank_pool import RankPool
from worker.models.config import config_from_json
from worker.models.library.parallel import divisions
from worker.models.registry import ARCHITECTURES

_MOST_ERROR = 1e-4
_MAX_TOKENS = 64
# Its towers for images and sound are built at their full size.
_SLOW = ("phi4_multimodal",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One class. refused: why; empty: it is computed."""

    model_type: str
    name: str
    is_own: bool
    refused: str = ""
    error: float = 0.0
    wrong: tuple[str, ...] = ()
    # Ranks on which real workers have computed it.
    ranks: tuple[int, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks decoders of transformers.")
    parser.add_argument("--only", default="", help="comma-separated model types")
    parser.add_argument(
        "--head-dim",
        type=int,
        default=0,
        help="16: a size of heads that caches have, so that more modules are "
        "exchanged by their formulas; default: sizes that are none",
    )
    parser.add_argument("--tensor-parallel", action="store_true", help="run real workers, too")
    parser.add_argument("--page", type=Path, help="write the table of models there")
    parser.add_argument("--json", action="store_true", help="a line for each class")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    logging.getLogger("octavo").setLevel(logging.ERROR)
    only = {each for each in arguments.only.split(",") if each}
    lines: list[Line] = []
    with RankPool() as pool:
        for model_type, name in decoder_classes():
            if only and model_type not in only:
                continue
            line = _line(model_type, name, arguments.head_dim, pool if arguments.tensor_parallel else None)
            lines.append(line)
            _print(line, as_json=arguments.json)
    computed = [line for line in lines if not line.refused]
    num_right = sum(not line.wrong for line in computed)
    if not arguments.json:
        print(f"{num_right} of {len(computed)} are right, {len(lines) - len(computed)} are refused")
    if arguments.page is not None:
        write_page(arguments.page, lines)
    return 0 if num_right == len(computed) else 1


def _line(model_type: str, name: str, head_dim: int, pool: RankPool | None) -> Line:
    is_own = name in ARCHITECTURES
    refused = _refusal(model_type, name)
    if refused:
        return Line(model_type=model_type, name=name, is_own=is_own, refused=refused)
    with tempfile.TemporaryDirectory() as base:
        # Some configs need a size of their own.
        is_free = vars(tiny_config(model_type, name)).get("head_dim") == SIZES["head_dim"]
        reference = tiny_model(model_type, name, **({"head_dim": head_dim} if head_dim and is_free else {}))
        directory = write(reference, Path(base))
        checked = check(reference, load(directory), num_tokens=_MAX_TOKENS)
        wrong = list(checked.different)
        if checked.num_equal < checked.num_tokens:
            wrong.append(f"{checked.num_equal} of {checked.num_tokens} tokens equal")
        error, ranks = checked.error, list[int]()
        for size in () if pool is None else (1, 2) if _has_plan(reference) else (1,):
            assert pool is not None
            outcome = run_layout(
                pool, directory, reference, Layout(tensor=size), max_tokens=_MAX_TOKENS, model_impl="transformers"
            )
            error = max(error, outcome.error)
            if outcome.num_equal < NUM_SAID:
                wrong.append(f"{outcome.num_equal} of {NUM_SAID} outputs equal on {size} ranks")
            if not (outcome.num_preemptions and outcome.num_prefix_hits and outcome.num_chunked):
                wrong.append(f"no preemption, prefix hit or chunk on {size} ranks")
            ranks.append(size)
    if error > _MOST_ERROR:
        wrong.append(f"error {error:.1e}")
    return Line(model_type=model_type, name=name, is_own=is_own, error=error, wrong=tuple(wrong), ranks=tuple(ranks))


def _refusal(model_type: str, name: str) -> str:
    """Returns why a class is refused, or cannot be checked; empty: neither."""
    if model_type in _SLOW:
        return "not checked: its towers for images and sound are built at their full size"
    try:
        config = tiny_config(model_type, name)
    except Exception as error:  # noqa: BLE001 - a class of the library's may refuse sizes in any way
        unchecked = f"not checked: no tiny model ({' '.join(str(error).split())})"
        try:
            config = default_config(name)
        except Exception:  # noqa: BLE001 - as above
            return unchecked
    else:
        unchecked = ""
    try:
        config_from_json(config.to_dict(), model_impl="transformers")
    except ValueError as error:
        return str(error).partition(" is refused: ")[2] or str(error)
    return unchecked


def _has_plan(reference: transformers.PreTrainedModel) -> bool:
    """Returns True if the library says how to divide the model, and this backend can."""
    try:
        divisions(reference.base_model, (), Shard(rank=0, size=2))
    except ValueError:
        return False
    return True


def _print(line: Line, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(line)), flush=True)
        return
    says = f"refused: {line.refused}" if line.refused else f"error {line.error:.1e}, ranks {line.ranks or '-'}"
    wrong = f"   WRONG: {'; '.join(line.wrong)}" if line.wrong else ""
    print(f"{line.model_type:24} {line.name:34} {says}{wrong}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
