"""All GPU benchmarks: correctness first, then a table, and JSON.

    python -m benchmarks.gpu.run_all [--only paged_attention,moe] [--json FILE] [--minutes 8]
    python -m benchmarks.gpu.run_all --toy      without a GPU: interpreted, toy sizes, checks only

Needs torch, triton and numpy; peers that can be imported are measured beside.
"""

import argparse
import importlib
import json
import os
import pkgutil
import sys
import time
import traceback
from pathlib import Path

_NO_BENCHMARKS = {"run_all", "report"}


def main() -> int:
    arguments = _arguments()
    if arguments.toy:
        # Before Triton is imported: its own functions are made for one way of running then.
        os.environ["TRITON_INTERPRET"] = "1"

    import torch

    from benchmarks.gpu.report import Report

    if not arguments.toy and not torch.cuda.is_available():
        print("no GPU: --toy checks that everything works, in Triton's interpreter", file=sys.stderr)
        return 2
    report = Report(
        toy=arguments.toy,
        device="cpu" if arguments.toy else "cuda",
        deadline=time.monotonic() + 60 * arguments.minutes,
    )
    failed = [name for name in _names(arguments.only) if not _run(name, report)]
    print(report.table())
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**report.as_json(), "failed": failed}, indent=1) + "\n")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="All GPU benchmarks.")
    parser.add_argument("--toy", action="store_true", help="toy sizes in Triton's interpreter, checks only")
    parser.add_argument("--only", default="", help="names of benchmarks, with commas between")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--minutes", type=float, default=8.0, help="what does not fit is skipped, and said so")
    return parser.parse_args()


def _names(only: str) -> list[str]:
    import benchmarks.gpu

    found = sorted(module.name for module in pkgutil.iter_modules(benchmarks.gpu.__path__))
    names = [name for name in found if name not in _NO_BENCHMARKS and not name.startswith("_")]
    if not only:
        return names
    unknown = set(only.split(",")) - set(names)
    if unknown:
        raise SystemExit(f"--only {','.join(sorted(unknown))}: the benchmarks are {', '.join(names)}")
    return only.split(",")


def _run(name: str, report: object) -> bool:
    """One that fails does not take the others' figures with it."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        module = importlib.import_module(f"benchmarks.gpu.{name}")
        module.run(report, toy=report.toy)  # pyright: ignore[reportAttributeAccessIssue]
    except Exception:  # noqa: BLE001 - said in full, and in the exit status
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
