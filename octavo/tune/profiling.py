"""Records some steps with torch.profiler: `python -m octavo.tune.profiling -c options.yaml --output FILE`.

FILE (.json.gz) opens in Perfetto (ui.perfetto.dev) and in chrome://tracing. The engine runs in this process, without
router and sockets. It has Python's calls; on a CPU a decode step is one call into C++, which is one event.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from configs.load import load_options
from octavo.cluster.runtime_files import child_environment

# Loading, and a few steps.
_TIMEOUT_S = 900.0
_PROFILED_TOKENS = 16
_MOST_PROMPT_TOKENS = 2048


def profile(options_file: Path, output: Path, *, batch: int, prompt_len: int) -> str:
    """Runs this module in a process of its own, whose memory ends with it. Returns why it failed, or nothing."""
    flags = {"-c": options_file, "--output": output, "--batch": batch, "--prompt-len": prompt_len}
    command = [sys.executable, "-m", "octavo.tune.profiling", *(str(part) for pair in flags.items() for part in pair)]
    try:
        done = subprocess.run(
            command, env=child_environment(), capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"the engine took more than {_TIMEOUT_S:g} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return (lines[-1] if lines else f"exit code {done.returncode}") if done.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", type=Path, required=True, metavar="FILE", help="options in YAML")
    parser.add_argument("--output", type=Path, required=True, help="where the trace goes")
    parser.add_argument("--batch", type=int, default=8, help="requests at once; default: %(default)s")
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens of each; default: %(default)s")
    arguments = parser.parse_args()
    options = load_options(arguments.c, {"data_parallel_size": 1})
    # Before torch, which takes seconds to import: a wrong file is told at once.
    import torch

    from octavo.bench.throughput import Bench

    prompt_len = min(arguments.prompt_len, _MOST_PROMPT_TOKENS)
    bench = Bench(options, prompt_len=prompt_len, output_len=_PROFILED_TOKENS, seed=0)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    bench.measure(arguments.batch, profile=False, on_tokens=lambda count: None)
    with torch.profiler.profile(activities=activities, with_stack=True) as profiler:
        bench.measure(arguments.batch, profile=False, on_tokens=lambda count: None, warms_up=False)
    profiler.export_chrome_trace(str(arguments.output))


if __name__ == "__main__":
    main()
