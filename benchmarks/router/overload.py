"""Offers a cluster ten times the load that it can serve; measures its goodput, refusals, latencies and memory.

    python -m benchmarks.router.overload                      a minute of overload; about two in all
    python -m benchmarks.router.overload --seconds 10 --json  shorter; a line of JSON instead of words

SmolLM2 behind one router and one scheduler (`octavo up`), with 8 rows and a queue of 16 requests; prompts of 16 tokens,
16 out. First the best of several closed loops gives the cluster's peak; it runs once more at the end, and the better
result counts. Then an open loop sends ten times as many requests a second, by raw calls that never retry and ignore
retry delays; half of them have a deadline. Goodput is tokens/s of requests that finish, in time if they have a
deadline. Every refusal must carry RetryInfo, and afterwards the cluster must become idle and still answer. Sizes of
processes are resident memory. The sender is this process; it shares the cores with the cluster, and its share of a core
is reported.

Exits 1 if goodput is below 90% of the peak, if a refusal lacks RetryInfo, if a request ended other than finished,
refused or past its deadline, or if requests are left over or the cluster no longer answers.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
import urllib.request
from dataclasses import dataclass, field

import grpc
import grpc.aio
import psutil

from benchmarks.cluster.small_cluster import cluster
from benchmarks.router.offered_load import FINISHED, REFUSED, Outcomes, Sender, Shape, closed_loop, open_loop
from protos.inference_pb2_grpc import InferenceStub
from tests.support.ports import free_port

NUM_ROWS, NUM_QUEUED = 8, 16
FACTOR = 10
LEAST_GOODPUT = 0.9
# Clients of the closed loops: fewer than rows, as many as rows, and some that wait.
CLIENTS = (NUM_ROWS // 2, NUM_ROWS, NUM_ROWS + NUM_QUEUED // 2)
_EXPECTED_ENDS = {FINISHED, REFUSED, grpc.StatusCode.DEADLINE_EXCEEDED.name}
_GAUGES = re.compile(r"^octavo_(streams|num_requests_running|num_requests_waiting)(?:\{.*\})? (\S+)$", re.M)
_MIB = 2**20
_LOOK_S = 0.25


class Processes:
    """The memory and CPU time of the cluster's processes, by the module that each runs."""

    def __init__(self) -> None:
        self._by_name = {_name_of(process): process for process in psutil.Process().children(recursive=True)}
        # Times, with the CPU seconds of each process and of the sender until then.
        self._used: list[tuple[float, dict[str, float]]] = []
        self.largest: dict[str, int] = {}

    def sizes(self) -> dict[str, int]:
        """Resident memory in MiB, by process."""
        return {name: process.memory_info().rss // _MIB for name, process in self._by_name.items()}

    async def watch(self) -> None:
        """Samples memory and CPU time until cancelled."""
        while True:
            used = {name: sum(process.cpu_times()[:2]) for name, process in self._by_name.items()}
            self._used.append((time.monotonic(), used | {"sender": time.process_time()}))
            for name, size in self.sizes().items():
                self.largest[name] = max(self.largest.get(name, 0), size)
            await asyncio.sleep(_LOOK_S)

    def shares(self, outcomes: Outcomes) -> dict[str, float]:
        """Share of one core that each process used in the outcomes' stretch of time."""
        within = [each for each in self._used if outcomes.began <= each[0] < outcomes.ended]
        (began, first), (ended, last) = within[0], within[-1]
        return {name: round((last[name] - first[name]) / (ended - began), 3) for name in last}


@dataclass(slots=True, kw_only=True)
class Report:
    peak: Outcomes
    offered_per_s: float
    overload: Outcomes
    # MiB by process: before the overload, at most during it, and afterwards.
    sizes: dict[str, tuple[int, int, int]]
    # Shares of a core by process, at the peak and in the overload.
    peak_shares: dict[str, float]
    shares: dict[str, float]
    # Requests that are still counted as live, by gauge; whether a normal request was answered.
    left_over: dict[str, float]
    answers: bool
    faults: list[str] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return self.overload.tokens_per_s / self.peak.tokens_per_s

    @property
    def goodput_per_cpu(self) -> float:
        """Goodput per second of the worker's CPU, which other programs on the machine affect less than elapsed time."""
        return self.goodput * self.peak_shares["worker"] / self.shares["worker"]

    def check(self) -> None:
        """Records a fault for each violated condition."""
        ends = self.overload.ends
        if self.goodput < LEAST_GOODPUT:
            self.faults.append(f"goodput is {self.goodput:.2f} of the peak")
        if self.overload.num_without_retry_info:
            self.faults.append(f"{self.overload.num_without_retry_info} refusals lack RetryInfo")
        if unexpected := ends.keys() - _EXPECTED_ENDS:
            self.faults.append(f"requests ended with {', '.join(sorted(unexpected))}")
        if any(self.left_over.values()):
            self.faults.append(f"left over: {self.left_over}")
        if not self.answers:
            self.faults.append("a normal request is not answered any more")

    def as_json(self) -> dict[str, object]:
        overload = self.overload
        return {
            "peak_tokens_per_s": round(self.peak.tokens_per_s, 1),
            "offered_requests_per_s": round(self.offered_per_s, 1),
            "seconds": round(overload.seconds, 1),
            "goodput_tokens_per_s": round(overload.tokens_per_s, 1),
            "goodput": round(self.goodput, 3),
            "goodput_per_worker_cpu": round(self.goodput_per_cpu, 3),
            "ends": dict(overload.ends),
            "refused_after_started": overload.num_refused_late,
            "refusals_without_retry_info": overload.num_without_retry_info,
            "retry_delay_s": _spread(overload.retry_delays),
            "refusal_ms": _spread([1000 * seconds for seconds in overload.refusal_seconds]),
            "latency_s": _spread(overload.latencies),
            "peak_latency_s": _spread(self.peak.latencies),
            "rss_mib": self.sizes,
            "cores": self.shares,
            "cores_at_peak": self.peak_shares,
            "left_over": self.left_over,
            "answers": self.answers,
            "faults": self.faults,
        }


def _name_of(process: psutil.Process) -> str:
    command = process.cmdline()
    return command[2] if command[1:2] == ["-m"] else "octavo up"


def _spread(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum."""
    if len(values) < 2:
        return {}
    return {
        "p50": round(statistics.median(values), 3),
        "p99": round(statistics.quantiles(values, n=100)[98], 3),
        "max": round(max(values), 3),
    }


def live_requests(metrics_ports: list[int]) -> dict[str, float]:
    """Sums of the gauges of router and scheduler that are 0 when nothing is live."""
    sums: dict[str, float] = {}
    for port in metrics_ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            for name, value in _GAUGES.findall(answer.read().decode()):
                sums[name] = sums.get(name, 0.0) + float(value)
    assert len(sums) == 3, f"expected three gauges, found {sums}"
    return sums


async def measure(target: str, metrics_ports: list[int], seconds: float, seed: int) -> Report:
    choose, processes = random.Random(seed), Processes()
    watching = asyncio.create_task(processes.watch())
    async with grpc.aio.insecure_channel(target) as channel:
        stub = InferenceStub(channel)
        calm = Sender(stub, Shape(), choose)
        calm_seconds = max(seconds / 6, 4.0)
        peaks = [await closed_loop(calm, clients, warm_up=2.0, seconds=calm_seconds) for clients in CLIENTS]
        peak = max(peaks, key=_rate)
        latency = statistics.median(peak.latencies)
        rate = FACTOR * peak.tokens_per_s / calm.shape.num_output_tokens
        first = processes.sizes()
        processes.largest.clear()
        sender = Sender(stub, Shape(deadlines=(2 * latency, 10 * latency)), choose)
        overload = await open_loop(sender, rate, choose, warm_up=3.0, seconds=seconds)
        largest = dict(processes.largest)
        left_over = await _until_idle(metrics_ports)
        again = Outcomes()
        await calm.send(again)
        last = processes.sizes()
        # The machine's speed may have changed meanwhile.
        clients = CLIENTS[peaks.index(peak)]
        peaks.append(await closed_loop(calm, clients, warm_up=2.0, seconds=calm_seconds))
    watching.cancel()
    peak = max(peaks, key=_rate)
    report = Report(
        peak=peak,
        offered_per_s=rate,
        overload=overload,
        sizes={name: (first[name], largest[name], last[name]) for name in last},
        shares=processes.shares(overload),
        peak_shares=processes.shares(peak),
        left_over=left_over,
        answers=again.ends[FINISHED] == 1,
    )
    report.check()
    return report


def _rate(outcomes: Outcomes) -> float:
    return outcomes.tokens_per_s


async def _until_idle(metrics_ports: list[int]) -> dict[str, float]:
    """Waits until nothing is live, for 10 s at most. Returns what still is."""
    until = time.monotonic() + 10
    left_over = live_requests(metrics_ports)
    while any(left_over.values()) and time.monotonic() < until:
        await asyncio.sleep(0.2)
        left_over = live_requests(metrics_ports)
    return left_over


def show(report: Report) -> None:
    overload, figures = report.overload, report.as_json()
    print(f"peak        {report.peak.tokens_per_s:8.1f} tokens/s")
    print(f"offered     {report.offered_per_s:8.1f} requests/s, {FACTOR} times as much, for {overload.seconds:.0f} s")
    print(f"goodput     {overload.tokens_per_s:8.1f} tokens/s, {report.goodput:.2f} of the peak")
    print(f"                     {report.goodput_per_cpu:.2f} of it per second of the worker's CPU")
    for end, count in overload.ends.most_common():
        print(f"            {count:8d} {end}")
    print(
        f"refusals    {overload.num_without_retry_info:8d} without RetryInfo, {overload.num_refused_late} after Started"
    )
    print(f"            delays (s) {figures['retry_delay_s']}")
    print(f"            took (ms) {figures['refusal_ms']}")
    print(f"latency (s) {figures['latency_s']}, at the peak {figures['peak_latency_s']}")
    for name, (first, most, last) in report.sizes.items():
        print(f"{name:12s}{first:8d} MiB before, {most} at most, {last} after")
    print(f"cores       {report.shares}")
    print(f"at the peak {report.peak_shares}")
    print(f"left over   {report.left_over}; {'answers' if report.answers else 'does not answer'}")
    for fault in report.faults:
        print(f"FAULT       {fault}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of overload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    port, metrics_port = free_port(), free_port()
    bounds = (f"--max-num-seqs={NUM_ROWS}", f"--max-queued-requests={NUM_QUEUED}", "--data-parallel-size=1")
    with cluster(port, *bounds, metrics_port=metrics_port):
        ports = [metrics_port, metrics_port + 1]
        report = asyncio.run(measure(f"localhost:{port}", ports, arguments.seconds, arguments.seed))
    if arguments.json:
        print(json.dumps(report.as_json()))
    else:
        show(report)
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
