"""The A/B part: each question in a process of its own, then the ops that no GPU has timed.

    python -m benchmarks.gpu.first_run.compare --json FILE [--seconds 110] [--toy]

A variant that this tree or machine lacks gets a row that says so (`missing`). Questions come in the order of what hangs
on their answers; each gets its share of the time that is left.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.processes import results

_QUESTIONS = "benchmarks.gpu.first_run.questions"
_OPS = "benchmarks.gpu.ops"
# Modules and relative shares of the time.
_PARTS = {
    f"{_QUESTIONS}.fp8_rows": 3.0,
    f"{_QUESTIONS}.e4m3_decode": 3.0,
    f"{_QUESTIONS}.bf16_decode": 1.5,
    f"{_QUESTIONS}.launches": 0.5,
    f"{_OPS}.int4_gemm": 1.5,
    f"{_OPS}.mla": 1.5,
    f"{_OPS}.sampling": 1.0,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Variants of kernels timed in turn.")
    parser.add_argument("--json", type=Path, required=True, help="file for all rows")
    parser.add_argument("--seconds", type=float, default=110.0, help="time for all of it")
    parser.add_argument("--only", default="", help="names of questions and ops, comma-separated")
    parser.add_argument("--toy", action="store_true", help="toy sizes in Triton's interpreter")
    arguments = parser.parse_args()
    if arguments.toy:
        os.environ["TRITON_INTERPRET"] = "1"
    from benchmarks.gpu.report import failed, table_of

    wanted = arguments.only.split(",") if arguments.only else []
    modules = [module for module in _PARTS if not wanted or module.rpartition(".")[2] in wanted]
    if not modules:
        parser.error(f"--only {arguments.only}: must be among {', '.join(m.rpartition('.')[2] for m in _PARTS)}")
    deadline = time.monotonic() + arguments.seconds

    def seconds_of(index: int) -> float:
        left = [_PARTS[module] for module in modules[index:]]
        return max(0.0, deadline - time.monotonic()) * left[0] / sum(left)

    rows: list[dict[str, Any]] = []
    for result in results(modules, seconds_of, toy=arguments.toy):
        rows += result["rows"]
        arguments.json.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")
    print(table_of(rows))
    return 1 if failed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
