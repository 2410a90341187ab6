"""Start-up time, idle CPU and memory of the local cluster (router, two schedulers, two workers).

    python -m benchmarks.cluster.footprint [--json]

Runs `octavo up -c configs/local.yaml` with a first prompt on ports of its own, takes the time to the first token, then
the CPU time of all its processes over 30 idle seconds, and their memory as PSS (shared pages counted once).
"""

import argparse
import json
import time

import psutil

from benchmarks.cluster.up import LOCAL, started

QUESTION = "What is the capital of France? Answer briefly."
IDLE_SECONDS = 30.0


def processes(launcher: int) -> list[psutil.Process]:
    parent = psutil.Process(launcher)
    return [parent, *parent.children(recursive=True)]


def cpu_seconds(launcher: int) -> float:
    return sum(each.cpu_times().user + each.cpu_times().system for each in processes(launcher))


def measure() -> dict[str, float | int]:
    start = time.monotonic()
    with started("-c", LOCAL, "--first-prompt", QUESTION, "--port=0") as up:
        assert up.stdout is not None
        first_token = next(time.monotonic() for line in up.stdout if "Paris" in line) - start
        next(line for line in up.stdout if "serving" in line)
        time.sleep(5.0)
        before = cpu_seconds(up.pid)
        time.sleep(IDLE_SECONDS)
        used = cpu_seconds(up.pid) - before
        pss = {f"{each.pid} {' '.join(each.cmdline()[1:4])}": each.memory_full_info().pss for each in processes(up.pid)}
    return {
        "first_answer_s": round(first_token, 1),
        "idle_cpu_percent_of_a_core": round(100 * used / IDLE_SECONDS, 2),
        "num_processes": len(pss),
        "pss_mib": round(sum(pss.values()) / 2**20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    figures = measure()
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:30} {value}")


if __name__ == "__main__":
    main()
