"""One model on ranks of every layout: real schedulers and workers over real sockets, against transformers.

The requests and the few blocks cause chunked prefills, preemptions and prefix cache hits.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from configs.options import Options
from protos import inference_pb2, scheduler_pb2
from scheduler.core.messages import CoreStats
from scheduler.server import SchedulerServer
from tests.support.models.families import VOCAB_SIZE
from tests.support.models.rank_pool import RankPool
from tests.support.scheduler.scheduling import RouterEnd

_SHARED = list(range(40, 73))
PROMPTS = (
    [*_SHARED, 7, 8, 9],
    [5, 6],
    [*_SHARED, 11],
    list(range(90, 70, -1)),
    [100, 3, 100, 4, 100, 5, 100],
    list(range(10, 49)),
)
# The last prompt is sent twice.
NUM_SAID = len(PROMPTS) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    tensor: int = 1
    stages: int = 1
    replicas: int = 1
    has_expert_parallel: bool = False

    def __str__(self) -> str:
        parts = [f"TP {self.tensor}", f"PP {self.stages}"]
        if self.has_expert_parallel:
            parts.append(f"EP {self.tensor * self.replicas}")
        return ", ".join([*parts, f"DP {self.replicas}"])

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.stages * self.replicas


LAYOUTS = (
    *(Layout(tensor=size) for size in (1, 2, 4)),
    *(Layout(stages=size) for size in (2, 4)),
    Layout(tensor=2, stages=2),
    Layout(tensor=1, replicas=2, has_expert_parallel=True),
    Layout(tensor=2, replicas=2, has_expert_parallel=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    # max |a - b| / max |b| of the log-probabilities of the whole vocabulary, at every output token.
    error: float
    # Outputs, out of NUM_SAID, whose tokens are all the likeliest ones of transformers.
    num_equal: int
    num_preemptions: int
    num_prefix_hits: int
    # Prompts longer than a step's token budget.
    num_chunked: int


def run_layout(
    pool: RankPool,
    directory: Path,
    reference: PreTrainedModel,
    layout: Layout,
    *,
    max_tokens: int = 12,
    model_impl: Literal["auto", "octavo", "transformers"] = "auto",
) -> Outcome:
    """Runs all prompts on the ranks of a layout. directory: holds the model. max_tokens: of each output."""
    options = _options(directory, layout, max_tokens, model_impl)
    return asyncio.run(_run(pool, options, reference, layout, max_tokens))


def _options(
    directory: Path, layout: Layout, max_tokens: int, model_impl: Literal["auto", "octavo", "transformers"]
) -> Options:
    """Too few blocks for all prompts and outputs together; a token budget below the longest prompt's length."""
    return Options(
        model_impl=model_impl,
        model=str(directory),
        served_model_name="model",
        dtype="float32",
        runtime_dir=directory / "run",
        block_size=8,
        num_blocks_override=10 + max_tokens // 8,
        max_model_len=52 + max_tokens,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        worker_threads=1,
        weight_cache=0,
        metrics_port=0,
        disable_log_stats=True,
        log_level="warning",
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.stages,
        data_parallel_size=layout.replicas,
        enable_expert_parallel=layout.has_expert_parallel,
    )


async def _run(
    pool: RankPool, options: Options, reference: PreTrainedModel, layout: Layout, max_tokens: int
) -> Outcome:
    places = [(replica, rank) for replica in range(layout.replicas) for rank in range(options.world_size)]
    async with AsyncExitStack() as stack:
        servers = [SchedulerServer(options, replica) for replica in range(layout.replicas)]
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        pool.start([_flags(options, replica, rank) for replica, rank in places])
        routers = [
            await stack.enter_async_context(RouterEnd(options.scheduler_address(replica)))
            for replica in range(layout.replicas)
        ]
        # The last replica has only one prompt, and nothing to do once that is done.
        of_prompt = [routers[min(index, layout.replicas - 1)] for index in range(len(PROMPTS))][::-1]
        # All prompts arrive before the first step, or the first might end before the last needs its blocks. Replicas
        # that share experts can't be frozen.
        frozen = [] if layout.has_expert_parallel else routers
        for router in frozen:
            await router.pause(scheduler_pb2.PAUSE_MODE_KEEP)
        groups = [await _submit(router, prompt, max_tokens) for router, prompt in zip(of_prompt, PROMPTS, strict=True)]
        for router in frozen:
            await router.wait_taken()
            await router.pause(scheduler_pb2.PAUSE_MODE_NONE)
        said = [await _result(router, group) for router, group in zip(of_prompt, groups, strict=True)]
        # Its prefix is cached now.
        said.append(await _result(of_prompt[-1], await _submit(of_prompt[-1], PROMPTS[-1], max_tokens)))
        stats = [server.step_loop.status.stats for server in servers]
    await asyncio.to_thread(pool.wait, len(places))
    return _outcome(reference, said, stats, options)


def _flags(options: Options, replica: int, rank: int) -> list[str]:
    given = [f"--{name}={value}" for name, value in options.model_dump(exclude_defaults=True).items()]
    return [*given, f"--replica={replica}", f"--rank={rank}"]


_Said = tuple[list[int], list[inference_pb2.TokenLogprobs]]


async def _submit(router: RouterEnd, prompt: list[int], max_tokens: int) -> int:
    """Prompts of even length want no logprobs, so that the workers need no logits."""
    wanted: dict[str, Any] = {"logprobs": VOCAB_SIZE} if len(prompt) % 2 else {}
    return await router.submit(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **wanted)


async def _result(router: RouterEnd, group: int) -> _Said:
    await router.finish(group)
    return router.tokens[group, 0], router.logprobs.get((group, 0), [])


def _outcome(reference: PreTrainedModel, said: list[_Said], stats: list[CoreStats], options: Options) -> Outcome:
    num_equal, error = 0, 0.0
    for prompt, (tokens, logprobs) in zip([*PROMPTS, PROMPTS[-1]], said, strict=True):
        expected_PV = _log_probabilities(reference, prompt, tokens)
        num_equal += expected_PV.argmax(1).tolist() == tokens
        if logprobs:
            difference_PV = _table(logprobs, expected_PV.shape[1]) - expected_PV
            error = max(error, float(difference_PV.abs().max() / expected_PV.abs().max()))
    return Outcome(
        error=error,
        num_equal=num_equal,
        num_preemptions=sum(each.num_preemptions for each in stats),
        num_prefix_hits=sum(each.num_prefix_hits for each in stats),
        num_chunked=sum(len(prompt) > options.max_num_batched_tokens for prompt in PROMPTS),
    )


def _log_probabilities(reference: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """[P, V]: at each position of `tokens`, given the prompt and the tokens before it."""
    with torch.inference_mode():
        logits_TV = reference(torch.tensor([prompt + tokens])).logits[0]
    return torch.log_softmax(logits_TV[len(prompt) - 1 : -1].float(), dim=1)


def _table(logprobs: list[inference_pb2.TokenLogprobs], vocab_size: int) -> torch.Tensor:
    table_PV = torch.full((len(logprobs), vocab_size), torch.nan)
    for position, each in enumerate(logprobs):
        assert len(each.top) == vocab_size
        for top in each.top:
            table_PV[position, top.token_id] = top.logprob
    return table_PV
