"""Stands in for `python -m octavo.bench.tune.measure`: a try takes one microsecond for each row of its tile.

    python tune_process.py LOG [unable]

With two stages the process dies; with three it answers with an error and says that this is its last answer. Each start
adds a line to LOG: the GPU.
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
