"""Runs all GPU benchmarks: correctness first, then figures.

    python -m benchmarks.gpu.run_all --json FILE                        everything, 8 minutes at most
    python -m benchmarks.gpu.run_all --json FILE --only end_to_end,moe  some of it, with the 8 minutes for that
    python -m benchmarks.gpu.run_all --toy                              no GPU: interpreted, toy sizes, checks only

Run it in the repository's root, with torch, triton and numpy: nothing has to be installed or built, and protos/ is not
needed. Peers that can be imported (flash-attn, flashinfer) are measured, too. A run ends with two tables: each case in
milliseconds and other units (share_of_copy is a fraction of a copy's bandwidth on the same GPU), and the targets for an
H200 beside the results. FILE has the same and more: date, device, versions, every check that passed (`checked`), what
was left out (`skipped`, with the reason) and what went wrong (`failed`). Each op has a process of its own
(processes.py), and FILE is written after each. The exit status is 1 if something failed, 2 if there is no GPU.

Kernels come first, whole models last (end_to_end). Each benchmark gets a share of the time that is left when its turn
comes; time that it does not use goes to the others.
"""

import argparse
import json
import os
import pkgutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.processes import results

_LAST = "end_to_end"
# Relative shares of the time; all others have 0.4.
_SHARES = {_LAST: 9.0, "paged_attention": 4.0, "fp8_gemm": 3.0, "moe": 1.5, "gemm": 1.0, "block_swap": 0.8}
_USUAL_SHARE = 0.4


def main() -> int:
    arguments = _arguments()
    if arguments.toy:
        # Before Triton is imported: the import decides how its own functions run.
        os.environ["TRITON_INTERPRET"] = "1"

    import torch

    from benchmarks.gpu.report import failed, table_of
    from benchmarks.gpu.targets import table, targets

    if not arguments.toy and not torch.cuda.is_available():
        print("no GPU: --toy checks that everything works, in Triton's interpreter", file=sys.stderr)
        return 2
    names = _names(arguments.only)
    deadline = time.monotonic() + 60 * arguments.minutes

    def seconds_of(index: int) -> float:
        print(f"{names[index]} ...", file=sys.stderr, flush=True)
        left = [_SHARES.get(each, _USUAL_SHARE) for each in names[index:]]
        return max(0.0, deadline - time.monotonic()) * left[0] / sum(left)

    rows: list[dict[str, Any]] = []
    for result in results([_module(name) for name in names], seconds_of, toy=arguments.toy):
        rows += result["rows"]
        if arguments.json is not None:
            found = [target.as_json() for target in targets(rows)]
            arguments.json.write_text(json.dumps({**result, "rows": rows, "targets": found}, indent=1) + "\n")
    print(table_of(rows))
    print(f"\n{table(targets(rows))}")
    if found := failed(rows):
        print(f"failed: {'; '.join(found)}", file=sys.stderr)
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs all GPU benchmarks.")
    parser.add_argument("--toy", action="store_true", help="toy sizes in Triton's interpreter, checks only")
    parser.add_argument("--only", default="", help="names of benchmarks, comma-separated")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit; the report lists what is skipped")
    return parser.parse_args()


def _names(only: str) -> list[str]:
    from benchmarks.gpu import ops

    found = {module.name for module in pkgutil.iter_modules(ops.__path__)}
    names = sorted(name for name in found if not name.startswith("_"))
    names.append(_LAST)
    if not only:
        return names
    unknown = set(only.split(",")) - set(names)
    if unknown:
        raise SystemExit(f"--only {','.join(sorted(unknown))}: must be among {', '.join(names)}")
    return only.split(",")


def _module(name: str) -> str:
    return f"benchmarks.gpu.{name}" if name == _LAST else f"benchmarks.gpu.ops.{name}"


if __name__ == "__main__":
    sys.exit(main())
