"""Runs a workload through replicas under a virtual clock: the scheduling core is real, rows only count tokens, and
steps only take time.
"""

import heapq
import itertools
import math
import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.lab.bounds import as_measured
from octavo.lab.errors import PlanError
from octavo.plan.costs.step_shape import CostModel, PaperRows, StepShape
from octavo.plan.workload import Workload
from octavo.reports import summary
from protos import inference_pb2 as pb
from scheduler.core.core import Core
from scheduler.core.messages import (
    ChoiceStart,
    CoreSettings,
    FinishReason,
    RejectReason,
    Result,
    StepCosts,
    StepOutputs,
)
from scheduler.ranks.group_requests import group_request


class Replica:
    """A replica that shares a virtual clock with others; times are in seconds."""

    def __init__(
        self,
        settings: CoreSettings,
        cost: CostModel,
        acceptance: float = 0.0,
        outputs: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """outputs: the tokens that requests generate, by their number; None: any tokens."""
        self.core = Core(settings)
        if settings.speculation is not None:
            self.core.set_costs(_step_costs(settings, cost))
        # Requests that have arrived and not ended.
        self.num_outstanding = 0
        self.num_steps = 0
        # Seconds of one stage by part, summed over all steps.
        self.part_seconds = [0.0] * len(cost.parts)
        self.kv_usage_peak = 0.0
        self._settings, self._cost = settings, cost
        has_own_drafters = settings.speculation is not None and bool(settings.speculation.drafters)
        self._rows = PaperRows(
            settings.max_num_seqs,
            # What the core's own drafters propose is right or wrong by the outputs themselves.
            acceptance=None if has_own_drafters and outputs is not None else acceptance,
            output_of=None if outputs is None else lambda sequence: outputs[self._request_of(sequence)],
        )
        self._in_flight: deque[Result] = deque()
        # When the scheduler and each stage will have finished their work so far.
        self._host_free = 0.0
        self._stage_free = [0.0] * cost.num_stages
        # For the mean share of blocks in use over time.
        self._kv_usage, self._kv_usage_since, self._kv_usage_seconds = 0.0, 0.0, 0.0

    def submit(self, workload: Workload, index: int, now: float) -> bool:
        """Queues a request; returns False if the queue is full. Raises PlanError for one that can never be served."""
        rejection = self.core.submit(
            group_request(
                pb.SamplingParams(max_tokens=int(workload.output_lens[index]), ignore_eos=True),
                group=index,
                request_id=str(index),
                prompt_token_ids=workload.prompt(index),
                choices=(ChoiceStart(choice=0),),
            ),
            now,
        )
        if rejection is None:
            self.num_outstanding += 1
            return True
        if rejection.reason is RejectReason.QUEUE_FULL:
            return False
        raise PlanError(
            f"request {index + 1} of the workload, {workload.prompt_lens[index]} tokens in and "
            f"{workload.output_lens[index]} out, is refused: {rejection.message}"
        )

    def start_step(self, now: float) -> float | None:
        """Plans a step if possible. Returns the time of its result, or None."""
        plan = self.core.schedule(now)
        if plan is None:
            return None
        shape, result = self._rows.apply(plan)
        self._in_flight.append(result)
        parts = self._cost.stage_seconds(shape)
        seconds = sum(parts)
        # Lists are faster than arrays for so few numbers.
        self.part_seconds = list(map(operator.add, self.part_seconds, parts))
        self.num_steps += 1
        self._note_kv_usage(now)
        self._host_free = end = max(now, self._host_free) + self._cost.host_seconds
        for stage, free in enumerate(self._stage_free):
            self._stage_free[stage] = end = max(end, free) + seconds
        return end

    def finish_step(self, now: float) -> StepOutputs:
        """Applies the result of the oldest step in flight."""
        outputs = self.core.apply(self._in_flight.popleft(), now)
        self.num_outstanding -= len(outputs.ends)
        if not self._in_flight:
            self._note_kv_usage(now)
        return outputs

    def _request_of(self, sequence: int) -> int:
        key = self.core.key_of(sequence)
        assert key is not None, sequence
        return key[0]

    def mean_kv_usage(self, duration: float) -> float:
        """Mean share of the blocks in use, over `duration` seconds from the start."""
        return self._kv_usage_seconds / duration

    def _note_kv_usage(self, now: float) -> None:
        self._kv_usage_seconds += self._kv_usage * (now - self._kv_usage_since)
        self._kv_usage_since = now
        self._kv_usage = 1.0 - self.core.load.num_free_blocks / self._settings.num_blocks
        self.kv_usage_peak = max(self.kv_usage_peak, self._kv_usage)


def _step_costs(settings: CoreSettings, cost: CostModel) -> StepCosts:
    """Costs of decoding steps by their tokens. Reading KV is left out: the drafts of a row share it. Drafting costs
    nothing."""
    most = settings.max_num_batched_tokens
    num_tokens = [*itertools.takewhile(lambda number: number < most, (2**power for power in range(32))), most]
    seconds = [cost.host_seconds + sum(cost.stage_seconds(_decodes(number))) for number in num_tokens]
    return StepCosts(
        num_tokens=tuple(num_tokens), seconds=tuple(seconds), draft_seconds=(seconds[0] * 1e-6,) * len(num_tokens)
    )


def _decodes(number: int) -> StepShape:
    return StepShape(
        num_decodes=number,
        num_prefill_tokens=0,
        num_chunks=0,
        num_sampled=number,
        decode_context=0,
        chunk_context=0,
        attention_pairs=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of a simulation. Times are in seconds; ttft and e2e have an entry per request that ended, gaps one per
    token but the first."""

    num_requests: int
    # Requests that a full queue refused.
    num_refused: int
    # From the first arrival to the last end.
    duration: float
    ttft: np.ndarray
    e2e: np.ndarray
    gaps: np.ndarray
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    # Seconds on one stage by part of the cost model, summed over steps and replicas.
    part_seconds: dict[str, float]
    # Share of the stages' time without a step.
    idle: float
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    # Share of the blocks in use: mean over time and replicas, and the peak of any replica.
    kv_usage_mean: float
    kv_usage_peak: float

    @property
    def output_tokens_per_second(self) -> float:
        return self.per_second(self.num_output_tokens)

    def per_second(self, count: float) -> float:
        return count / self.duration if self.duration else 0.0

    def as_json(self) -> dict[str, Any]:
        """The numbers in the keys of a report of `octavo bench serve`."""
        queries = self.num_prefix_queries
        return {
            "num_requests": self.num_requests,
            "duration_s": round(self.duration, 4),
            "requests_s": round(self.per_second(self.num_requests), 3),
            "output_tok_s": round(self.output_tokens_per_second, 2),
            "total_tok_s": round(self.per_second(self.num_prompt_tokens + self.num_output_tokens), 2),
            **summary("ttft_s", self.ttft, 1.0),
            **summary("itl_ms", self.gaps, 1e3),
            **summary("e2e_s", self.e2e, 1.0),
            "prefix_hit_rate": round(self.num_prefix_hits / queries, 4) if queries else 0.0,
        }

    def measured(self) -> dict[str, Any]:
        """The numbers that matter, as `as_measured`. Refused requests count as failed."""
        counts = {"num_requests": self.num_requests + self.num_refused, "num_errors": self.num_refused}
        return as_measured(self.as_json() | counts)


def simulate(
    settings: CoreSettings, cost: CostModel, workload: Workload, *, num_replicas: int = 1, acceptance: float = 0.0
) -> Run:
    """Simulates a workload. Each request goes to the replica with the fewest requests, as in the router's least-loaded
    policy.

    acceptance: the probability that a draft of the workers is right, if the settings have speculation.

    Raises PlanError for a request that can never be served.
    """
    return _Simulation(settings, cost, workload, num_replicas, acceptance).run()


class _Simulation:
    def __init__(
        self, settings: CoreSettings, cost: CostModel, workload: Workload, num_replicas: int, acceptance: float
    ) -> None:
        self._cost, self._workload = cost, workload
        self._replicas = [Replica(settings, cost, acceptance, workload.outputs) for _ in range(num_replicas)]
        self._next_request = 0
        self._num_under_way = 0
        self._num_refused = 0
        # (time of a step's result, replica).
        self._results: list[tuple[float, int]] = []
        count = len(workload)
        self._began = np.full(count, math.nan)
        self._first_token = np.full(count, math.nan)
        self._last_token = np.full(count, math.nan)
        self._ended = np.full(count, math.nan)
        self._gaps: list[np.ndarray] = []

    def run(self) -> Run:
        now = 0.0
        while (event := self._next_event(now)) < math.inf:
            now = event
            # Handle everything that happens at this time before planning the next steps.
            busy: set[int] = set()
            while self._results and self._results[0][0] <= now:
                busy.add(self._finish_step(now))
            busy |= self._admit(now)
            for index in sorted(busy):
                while (end := self._replicas[index].start_step(now)) is not None:
                    heapq.heappush(self._results, (end, index))
        assert not any(replica.core.has_work for replica in self._replicas), "requests are waiting that can never run"
        return self._summary(now)

    # --- Events

    @property
    def _may_enter(self) -> bool:
        """True if the workload's concurrency allows another request."""
        concurrency = self._workload.concurrency
        return self._next_request < len(self._workload) and (not concurrency or self._num_under_way < concurrency)

    def _next_event(self, now: float) -> float:
        arrival = max(now, self._workload.arrivals[self._next_request]) if self._may_enter else math.inf
        return min(float(arrival), self._results[0][0] if self._results else math.inf)

    def _admit(self, now: float) -> set[int]:
        """Submits the requests that have arrived; returns the replicas that took one."""
        chosen = set()
        while self._may_enter and self._workload.arrivals[self._next_request] <= now:
            request = self._next_request
            self._next_request += 1
            index = min(range(len(self._replicas)), key=lambda i: self._replicas[i].num_outstanding)
            if self._replicas[index].submit(self._workload, request, now):
                self._began[request] = now if self._workload.concurrency else self._workload.arrivals[request]
                self._num_under_way += 1
                chosen.add(index)
            else:
                self._num_refused += 1
        return chosen

    def _finish_step(self, now: float) -> int:
        _, index = heapq.heappop(self._results)
        self._record(self._replicas[index].finish_step(now), now)
        return index

    def _record(self, outputs: StepOutputs, now: float) -> None:
        requests = outputs.groups
        is_first = outputs.first_tokens == 0
        if is_first.any():
            self._first_token[requests[is_first]] = now
            self._gaps.append(now - self._last_token[requests[~is_first]])
        else:
            self._gaps.append(now - self._last_token[requests])
        self._last_token[requests] = now
        for end in outputs.ends:
            assert end.reason is FinishReason.LENGTH, end
            self._ended[end.key[0]] = now
        self._num_under_way -= len(outputs.ends)

    # --- Summary

    def _summary(self, now: float) -> Run:
        workload, replicas = self._workload, self._replicas
        done = ~np.isnan(self._ended)
        start = float(np.nanmin(self._began)) if done.any() else 0.0
        seconds = [sum(of_replicas) for of_replicas in zip(*(each.part_seconds for each in replicas), strict=True)]
        duration = now - start
        # Every stage of a replica spends the same time on each step.
        idle = 1.0 - sum(seconds) / (duration * len(replicas)) if duration else 0.0
        stats = [replica.core.stats for replica in replicas]
        return Run(
            num_requests=int(done.sum()),
            num_refused=self._num_refused,
            duration=duration,
            ttft=(self._first_token - self._began)[done],
            e2e=(self._ended - self._began)[done],
            gaps=np.concatenate(self._gaps) if self._gaps else np.empty(0),
            num_prompt_tokens=int(workload.prompt_lens[done].sum()),
            num_output_tokens=int(workload.output_lens[done].sum()),
            num_steps=sum(replica.num_steps for replica in replicas),
            num_draft_tokens=sum(each.num_draft_tokens for each in stats),
            num_accepted_tokens=sum(each.num_accepted_tokens for each in stats),
            part_seconds=dict(zip(self._cost.parts, seconds, strict=True)),
            idle=idle,
            num_preemptions=sum(each.num_preemptions for each in stats),
            num_prefix_queries=sum(each.num_prefix_queries for each in stats),
            num_prefix_hits=sum(each.num_prefix_hits for each in stats),
            kv_usage_mean=sum(replica.mean_kv_usage(now) for replica in replicas) / len(replicas) if now else 0.0,
            kv_usage_peak=max(replica.kv_usage_peak for replica in replicas),
        )
