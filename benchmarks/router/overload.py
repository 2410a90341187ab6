"""A cluster that is offered ten times what it can do: what it still gets done, whom it refuses and how, what it holds.

    python -m benchmarks.router.overload                      a minute of it; about two in all
    python -m benchmarks.router.overload --seconds 10 --json  shorter; a line of JSON instead of words

SmolLM2 behind one router and one scheduler (`octavo up`), with 8 rows and a queue of 16 requests; prompts of 16 tokens,
16 out. First the best closed loop says what the cluster can do: its peak (and once more at the end: the better one
counts). Then requests come in an open loop, ten times as many a second, by raw calls that try nothing again and heed
nothing; half of them have a deadline. Goodput is tokens/s of requests that finish, in time if they have a deadline.
Every refusal has to carry RetryInfo, and after all that the cluster has to be idle and to answer. Sizes of processes
are resident bytes. The sender is this process; it shares the cores with the cluster, and how much of one it took is
told.

Exits 1 if goodput is below 90% of the peak, if a refusal lacks RetryInfo, if anything ended in another way than
finished, refused or past its deadline, or if something is left.
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
from benchmarks.peers.server_process import free_port
from benchmarks.router.offered_load import FINISHED, REFUSED, Outcomes, Sender, Shape, closed_loop, open_loop
from protos.inference_pb2_grpc import InferenceStub

NUM_ROWS, NUM_QUEUED = 8, 16
FACTOR = 10
LEAST_GOODPUT = 0.9
# Clients of the closed loops: few, as many as rows, and some that wait.
CLIENTS = (NUM_ROWS // 2, NUM_ROWS, NUM_ROWS + NUM_QUEUED // 2)
_EXPECTED_ENDS = {FINISHED, REFUSED, grpc.StatusCode.DEADLINE_EXCEEDED.name}
_GAUGES = re.compile(r"^octavo_(streams|num_requests_running|num_requests_waiting)(?:\{.*\})? (\S+)$", re.M)
_MIB = 2**20
_LOOK_S = 0.25


class Processes:
    """The cluster's, by the module that each runs: how much memory and CPU time they take."""

    def __init__(self) -> None:
        self._by_name = {_name_of(process): process for process in psutil.Process().children(recursive=True)}
        # Times, and CPU seconds of each process and of the sender by then.
        self._used: list[tuple[float, dict[str, float]]] = []
        self.largest: dict[str, int] = {}

    def sizes(self) -> dict[str, int]:
        """In MiB."""
        return {name: process.memory_info().rss // _MIB for name, process in self._by_name.items()}

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            used = {name: sum(process.cpu_times()[:2]) for name, process in self._by_name.items()}
            self._used.append((time.monotonic(), used | {"sender": time.process_time()}))
            for name, size in self.sizes().items():
                self.largest[name] = max(self.largest.get(name, 0), size)
            await asyncio.sleep(_LOOK_S)

    def shares(self, outcomes: Outcomes) -> dict[str, float]:
        """Of one core, in the stretch that the outcomes are of."""
        within = [each for each in self._used if outcomes.began <= each[0] < outcomes.ended]
        (began, first), (ended, last) = within[0], within[-1]
        return {name: round((last[name] - first[name]) / (ended - began), 3) for name in last}


@dataclass(slots=True, kw_only=True)
class Report:
    peak: Outcomes
    offered_per_s: float
    overload: Outcomes
    # MiB by process: before the overload, at most, and afterwards.
    sizes: dict[str, tuple[int, int, int]]
    # Of a core, by process, at the peak and in the overload.
    peak_shares: dict[str, float]
    shares: dict[str, float]
    # What is counted as live anywhere; whether a normal request was answered.
    left_over: dict[str, float]
    answers: bool
    faults: list[str] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return self.overload.tokens_per_s / self.peak.tokens_per_s

    @property
    def goodput_per_cpu(self) -> float:
        """The same for a second of the worker's CPU, on which other programs of the machine weigh less than on time."""
        return self.goodput * self.peak_shares["worker"] / self.shares["worker"]

    def check(self) -> None:
        """Notes what must not be."""
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
    """Median, 99th percentile and most."""
    if len(values) < 2:
        return {}
    return {
        "p50": round(statistics.median(values), 3),
        "p99": round(statistics.quantiles(values, n=100)[98], 3),
        "max": round(max(values), 3),
    }


def live_requests(metrics_ports: list[int]) -> dict[str, float]:
    """The gauges of router and scheduler that are 0 when nothing is live."""
    sums: dict[str, float] = {}
    for port in metrics_ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            for name, value in _GAUGES.findall(answer.read().decode()):
                sums[name] = sums.get(name, 0.0) + float(value)
    assert len(sums) == 3, f"{sums}: gauges have other names now"
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
        # What the machine can do may have changed meanwhile.
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
    """What is still live when nothing is, or after 10 s."""
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
    print(f"                     {report.goodput_per_cpu:.2f} of it for a second of the worker's CPU")
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
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
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
