"""The measurements. Each adds rows to the report; a way is left out if there is no time for it."""

from dataclasses import dataclass, field

import numpy as np

from benchmarks.gpu.end_to_end.model_run import BLOCK_SIZE, ModelRun, Way
from benchmarks.gpu.end_to_end.schedule import Request, Schedule, random_requests
from benchmarks.gpu.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the measurements, in tokens unless noted."""

    # Steps of the sequence whose logits are checked.
    checked: tuple[int, ...]
    # Requests whose tokens are checked: their number, prompt length and output length. The tokens of all prompts, and
    # the number of requests, must be sizes of graphs.
    checked_requests: tuple[int, int, int]
    # Steady decodes: rows, tokens before them, steps before the timed ones, and timed steps.
    batches: tuple[int, ...]
    context: int
    num_warm_steps: int
    num_steps: int
    # Prefills: tokens of a step, tokens of a prompt, number of prompts.
    step_tokens: tuple[int, ...]
    prompt: int
    num_prompts: int
    # Throughput: number of requests, and the least and the most tokens of a prompt and of an output.
    num_requests: int
    lengths: tuple[int, int]

    def requests(self, vocab_size: int) -> list[Request]:
        """The requests of the throughput."""
        return random_requests(self.num_requests, vocab_size, prompts=self.lengths, outputs=self.lengths)

    def requests_to_check(self, vocab_size: int) -> list[Request]:
        count, prompt, outputs = self.checked_requests
        return random_requests(count, vocab_size, prompts=(prompt, prompt), outputs=(outputs, outputs))


@dataclass(slots=True)
class Measures:
    """Measures one model."""

    report: Report
    op: str
    run: ModelRun
    sizes: Sizes
    # Seconds of the slowest decode step, and of a prompt token.
    _step_seconds: dict[Way, float] = field(default_factory=dict)
    _token_seconds: float = 0.0

    def decodes(self, num_rows: int, ways: list[Way]) -> None:
        """Times decode steps of `num_rows` rows, each way. idle_share: the fraction of the time between the results of
        two steps in which the device does not compute."""
        case = f"{self.run.variant.name}, decode, {num_rows} x {self.sizes.context}"
        num_warm, num_timed = self.sizes.num_warm_steps, self.sizes.num_steps
        device_seconds = float("nan")
        for way in ways:
            if not self.report.has_time(3.0):
                self.report.skip(self.op, f"{case}, {way.name}", "no time left")
                continue
            if way.graphs and way == ways[0]:
                device_seconds = self._device_seconds(num_rows, way)
            times = self.run.run(self.decode_schedule(num_rows, num_warm + num_timed), way)
            seconds = self._timed(times[-1] - times[num_warm]) / num_timed
            self._step_seconds[way] = max(seconds, self._step_seconds.get(way, 0.0))
            self.report.row(
                self.op,
                case,
                way.name,
                seconds * 1e3,
                tokens_per_s=num_rows / seconds,
                device_ms=device_seconds * 1e3,
                idle_share=1 - device_seconds / seconds,
            )

    def _device_seconds(self, num_rows: int, way: Way) -> float:
        """Device time of the middle one of the timed steps, by replaying its graphs alone. Events around each timed
        step would not do: time that the device waits between them would count as its own."""
        self.run.run(self.decode_schedule(num_rows, self.sizes.num_warm_steps + self.sizes.num_steps // 2), way)
        return self._timed(self.run.device_seconds(num_rows, self.sizes.num_steps))

    def decode_schedule(self, num_rows: int, num_steps: int) -> Schedule:
        """Decodes that begin with the prompts' last tokens; the cache's random contents serve as the prompts' KV."""
        context = self.sizes.context
        prompts = np.random.default_rng(0).integers(self.run.variant.config.vocab_size, size=(num_rows, context))
        requests = [Request(prompt, num_steps) for prompt in prompts.astype(np.int32)]
        return self._schedule(requests, num_computed=context - 1)

    def prefills(self, step_tokens: int, way: Way) -> None:
        """Times steps of prompts only, each with as many whole prompts as fit."""
        sizes = self.sizes
        case = f"{self.run.variant.name}, prefill, {step_tokens // sizes.prompt} x {sizes.prompt}"
        if not self.report.has_time(10.0):
            self.report.skip(self.op, case, "no time left")
            return
        lengths = (sizes.prompt, sizes.prompt)
        requests = random_requests(
            sizes.num_prompts, self.run.variant.config.vocab_size, prompts=lengths, outputs=(1, 1)
        )
        few = requests[: max(1, step_tokens // sizes.prompt)]
        self.run.run(self._schedule(few, max_num_batched_tokens=step_tokens), way)
        times = self.run.run(self._schedule(requests, max_num_batched_tokens=step_tokens), way)
        seconds, num_steps = self._timed(times[-1] - times[0]), len(times) - 1
        self._token_seconds = seconds / (sizes.num_prompts * sizes.prompt)
        self.report.row(self.op, case, way.name, seconds / num_steps * 1e3, prompt_tokens_per_s=1 / self._token_seconds)

    def throughput(self, way: Way) -> None:
        """Times requests of random lengths that all begin together: the workload of nano-vllm's benchmark."""
        least, most = self.sizes.lengths
        case = f"{self.run.variant.name}, {self.sizes.num_requests} x {least}-{most} in and out"
        requests = self.sizes.requests(self.run.variant.config.vocab_size)
        num_outputs = sum(request.num_outputs for request in requests)
        num_prompt_tokens = sum(len(request.prompt) for request in requests)
        # 1.3: contexts grow beyond the timed ones.
        expected = 1.3 * (most * self._step_seconds.get(way, 0.0) + num_prompt_tokens * self._token_seconds)
        if not self.report.toy and not self.report.has_time(expected):
            self.report.skip(self.op, f"{case}, {way.name}", f"no time left: it takes some {expected:.0f} s")
            return
        # Compiles and loads first what steps of prompts and decodes need, so that it is not timed.
        few = [Request(request.prompt, 1 + row % 4) for row, request in enumerate(requests[: len(requests) // 8 + 2])]
        self.run.run(self._schedule(few), way)
        schedule = self._schedule(requests)
        times = self.run.run(schedule, way, may_go_on=lambda: self.report.has_time(0.0))
        if not schedule.is_done:
            self.report.skip(self.op, f"{case}, {way.name}", f"stopped after {len(times) - 1} steps: no time left")
            return
        seconds = self._timed(times[-1] - times[0])
        self.report.row(
            self.op,
            case,
            way.name,
            seconds * 1e3,
            output_tokens_per_s=num_outputs / seconds,
            tokens_per_s=(num_outputs + num_prompt_tokens) / seconds,
            num_steps=float(len(times) - 1),
        )

    def _schedule(
        self, requests: list[Request], *, num_computed: int = 0, max_num_batched_tokens: int | None = None
    ) -> Schedule:
        return Schedule(
            requests,
            block_size=BLOCK_SIZE,
            num_blocks=self.run.kv_cache.num_blocks,
            max_num_batched_tokens=max_num_batched_tokens or self.run.limits.max_num_batched_tokens,
            num_computed=num_computed,
        )

    def _timed(self, seconds: float) -> float:
        return float("nan") if self.report.toy else seconds
