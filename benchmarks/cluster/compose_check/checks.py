"""The checks, in their order, and their results."""

import asyncio
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

from benchmarks.cluster.compose_check.project import Project
from benchmarks.cluster.compose_check.streams import Outcome, Ports, differences, run_streams

# stop_grace_period in docker-compose.yml.
GRACE_S = 45.0
_MOVED = "octavo_resubmissions_total"
# Streams beside each other pause for far less, unless what computes them is gone.
_A_PAUSE_S = 1.0
_DIGEST_OF_KEYS = "cat /keys/* | sha256sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table. is_good: None for a figure that can't be wrong."""

    name: str
    result: str
    is_good: bool | None


class Checks:
    """Runs all checks on the project with two replicas, and starts it once with three."""

    def __init__(self, two: Project, three: Project, ports: Ports) -> None:
        self._two, self._three, self._ports = two, three, ports
        self._now = two
        self._expected: list[Outcome] = []
        self.rows: list[Row] = []

    def add(self, name: str, result: str, *, is_good: bool | None = None) -> None:
        self.rows.append(Row(name=name, result=result, is_good=is_good))
        print(f"{name}: {result}{'  FAILED' if is_good is False else ''}", file=sys.stderr, flush=True)

    async def run(self) -> None:
        self._start(self._two, "healthy after the first start")
        keys = self._two.exec("scheduler-0", "sh", "-c", _DIGEST_OF_KEYS)
        await self._stream_undisturbed()
        self._check_restart_policies()
        for service in self._two.processes:
            await self._kill(service)
        await self._restart_scheduler()
        self._stop()

        self._start(self._two, "healthy after a stop and a second start")
        self._check_keys("keys after a second start", keys)
        await self._stream_as_before("streams after a second start")
        self._two.compose("down")

        self._start(self._three, "healthy with a third replica")
        self._check_keys("keys after `down` and `up`", keys)
        num_ready = self._get(self._ports.metrics, "/health").count("is ready")
        self.add("replicas that the router sees as ready", str(num_ready), is_good=num_ready == 3)
        await self._stream_as_before("streams with a third replica")
        await self._kill("scheduler-2")

    def print_logs(self) -> None:
        """The last lines of each container, for people who look for a cause."""
        for service in self._now.processes:
            print(f"--- {service}\n{self._now.logs(service)}", file=sys.stderr)

    def _start(self, project: Project, name: str) -> None:
        self._now = project
        began = time.monotonic()
        project.up()
        project.wait_until_healthy(project.processes)
        self.add(name, f"{time.monotonic() - began:.1f} s", is_good=True)
        made = project.state("keys").exit_code
        if made != 0:
            self.add("service keys", f"exit code {made}", is_good=False)

    async def _stream_undisturbed(self) -> None:
        before = self._metric("octavo_generation_tokens_total")
        began = time.monotonic()
        self._expected = await run_streams(self._ports)
        took = time.monotonic() - began
        errors = [f"{outcome.name}: {outcome.error}" for outcome in self._expected if outcome.error]
        self.add("two gRPC and two HTTP streams", "; ".join(errors) or f"complete in {took:.1f} s", is_good=not errors)
        counted = self._metric("octavo_generation_tokens_total") - before
        sent = sum(len(outcome.result) for outcome in self._expected if outcome.name.startswith("gRPC"))
        self.add("tokens that the router's metrics count", f"{counted:.0f}", is_good=counted == 2 * sent > 0)
        await self._stream_as_before("the same streams again")

    async def _stream_as_before(self, name: str) -> None:
        wrong = differences(self._expected, await run_streams(self._ports))
        self.add(name, "; ".join(wrong) or "tokens equal", is_good=not wrong)

    def _check_restart_policies(self) -> None:
        policies = {service: self._two.state(service).restart_policy for service in self._two.processes}
        is_good = set(policies.values()) == {"unless-stopped"} and self._two.state("keys").restart_policy in ("no", "")
        self.add("restart policies", "unless-stopped, keys: no" if is_good else str(policies), is_good=is_good)

    async def _kill(self, service: str) -> None:
        """Kills a container under streams, and waits until its restart policy has brought it back."""
        project, restarts = self._now, self._now.state(service).num_restarts
        moved = self._metric(_MOVED)
        back_after = 0.0

        def kill() -> None:
            nonlocal back_after
            began = time.monotonic()
            project.kill(service)
            project.wait_until(lambda: project.state(service).num_restarts > restarts, f"the restart of {service}")
            project.wait_until_healthy([service])
            back_after = time.monotonic() - began

        found = await run_streams(self._ports, kill)
        wrong = differences(self._expected, found)
        if service == "router":
            # Its metrics begin anew, and HTTP can't resume: its streams break visibly, while those of gRPC go on.
            broken = [outcome.name for outcome in found if outcome.error]
            is_good = len(wrong) == len(broken) > 0 and all(name.startswith("HTTP") for name in broken)
            text = f"gRPC tokens equal, {len(broken)} HTTP streams broke" if is_good else "; ".join(wrong)
        else:
            moved = self._metric(_MOVED) - moved
            num_waited = sum(outcome.pause_s > _A_PAUSE_S for outcome in found)
            # A stream of a killed scheduler moves to another replica; one of a killed worker waits for its return.
            is_good = not wrong and moved + num_waited > 0
            text = "; ".join(wrong) or f"tokens equal, {moved:.0f} streams moved, {num_waited} waited"
        pause = max(outcome.pause_s for outcome in found)
        restarts = project.state(service).num_restarts - restarts
        self.add(
            f"kill of {service}",
            f"{text}; longest pause {pause:.1f} s, restarted and healthy after {back_after:.1f} s",
            is_good=is_good and restarts == 1,
        )
        await asyncio.to_thread(project.wait_until, self._is_complete, "readiness of all replicas")

    async def _restart_scheduler(self) -> None:
        moved = self._metric(_MOVED)
        found = await run_streams(self._ports, lambda: self._restart("scheduler-0"))
        wrong = differences(self._expected, found)
        moved = self._metric(_MOVED) - moved
        text = "; ".join(wrong) or f"tokens equal, {moved:.0f} streams moved"
        self.add("`restart scheduler-0` under streams", text, is_good=not wrong)
        await asyncio.to_thread(self._two.wait_until, self._is_complete, "readiness of all replicas")

    def _restart(self, service: str) -> None:
        self._two.compose("restart", service)

    def _stop(self) -> None:
        began = time.monotonic()
        self._two.compose("stop")
        took = time.monotonic() - began
        codes = {service: self._two.state(service).exit_code for service in self._two.processes}
        is_good = took < GRACE_S and set(codes.values()) == {0}
        text = f"{took:.1f} s, exit codes 0" if is_good else f"{took:.1f} s, exit codes {codes}"
        self.add("stop, all containers", text, is_good=is_good)

    def _check_keys(self, name: str, keys: str) -> None:
        is_same = self._now.exec("scheduler-0", "sh", "-c", _DIGEST_OF_KEYS) == keys
        self.add(name, "the same" if is_same else "others", is_good=is_same)

    def _is_complete(self) -> bool:
        num_replicas = sum(service.startswith("scheduler") for service in self._now.processes)
        return self._get(self._ports.metrics, "/health").count("is ready") == num_replicas

    def _metric(self, name: str) -> float:
        lines = self._get(self._ports.metrics, "/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def _get(self, port: int, path: str) -> str:
        """The body of an answer, whatever its status; empty if there is none yet."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.read().decode()
        except OSError:
            return ""
