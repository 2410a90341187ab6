"""Stands in for `python -m octavo.bench.tune.measure`: a try takes as many microseconds as its tile has rows.

    python tune_process.py LOG [unable]

Two stages: the process dies. Three: it answers with an error, and that it is its last. LOG gets a line at each start:
the GPU.
"""

import json
import os
import sys


def main() -> int:
    with open(sys.argv[1], "a") as log:
        log.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\n")
    if "unable" in sys.argv:
        print("no driver", file=sys.stderr)
        return 3
    for line in sys.stdin:
        question = json.loads(line)
        if not question:
            print("{}", flush=True)
            continue
        tile = question["tile"]
        if tile["num_stages"] == 2:
            return 7
        is_last = tile["num_stages"] == 3
        microseconds, error = (None, "CUDA error") if is_last else (tile["BLOCK_SIZE_M"], "")
        print(json.dumps({"microseconds": microseconds, "error": error, "is_last": is_last}), flush=True)
        if is_last:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
