"""A mixture whose experts are on different ranks: bits equal to one rank's on both paths of tokens, and bytes sent.

Ranks are threads here, and PyTorch computes.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.backend import Backend, gpu_backend, torch_backend
from kernels.cpu_backend import cpu_backend
from kernels.linear import Residual, Stream
from kernels.shard import ExpertShard, Shard
from tests.fakes.fake_model import fake_config
from tests.support.gpu.gpu import DEVICE
from tests.support.gpu.gpu_runs import DictReader
from tests.support.models.ranks import run_replicas
from worker.layers.experts.mixture import ExpertNames, MixtureOfExperts
from worker.layers.forward_context import ExpertLoad, ForwardContext, Workspace, forward_context
from worker.layers.kv_cache import KVCache
from worker.layers.residual import InputNorm, ResidualStream
from worker.model_config import ExpertsConfig
from worker.parallel.axes import Axes
from worker.parallel.expert_exchange import GATHERED_TOKENS
from worker.parallel.expert_placement import ExpertPlacement
from worker.parallel.gloo import GlooGroup
from worker.parallel.groups import Group, Groups, Rehearsal

HIDDEN_SIZE, INTERMEDIATE_SIZE = 32, 48
PREFIX, NORM = "model.layers.0.mlp", "model.layers.0.norm"
WHOLE_PATH = torch_backend(torch.float32)


class _Reader(DictReader):
    def keep(self, names: Sequence[str], packed: object) -> None:
        pass


class Mixture:
    """One rank's mixture, with random weights that are the same on all ranks."""

    def __init__(
        self, num_experts: int, top_k: int, groups: Groups, backend: Backend = WHOLE_PATH, *, num_redundant: int = 0
    ) -> None:
        experts = ExpertsConfig(
            num_experts=num_experts,
            num_experts_per_token=top_k,
            intermediate_size=INTERMEDIATE_SIZE,
            renormalize=True,
            layers=(True,),
        )
        self._config = fake_config(hidden_size=HIDDEN_SIZE, experts=experts)
        self._groups, self._load = groups, ExpertLoad(experts, range(1))
        shard = Shard(groups.tensor.rank, groups.tensor.size)
        experts_shard = ExpertShard(groups.experts.rank, groups.experts.size, num_redundant, step_interval=3)
        self._path = replace(backend, shard=shard, experts=experts_shard)
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * 0.2

        tensors = {f"{NORM}.weight": random(HIDDEN_SIZE), f"{PREFIX}.gate.weight": random(num_experts, HIDDEN_SIZE)}
        held = ExpertPlacement(num_experts, experts_shard.size).experts_of(experts_shard.rank)
        for expert in range(num_experts):
            for name in ExpertNames().tensors(expert):
                shape = (INTERMEDIATE_SIZE, HIDDEN_SIZE)
                weight = random(*(shape[::-1] if "down" in name else shape))
                # Reading an expert that another rank holds would be a KeyError.
                if expert in held:
                    tensors[f"{PREFIX}.{name}.weight"] = weight
        reader = _Reader({name: each.to(backend.device) for name, each in tensors.items()}, torch.float32)
        self._norm = InputNorm(NORM, self._config.rms_norm_eps)
        self._mixture = MixtureOfExperts(self._config, PREFIX, self._norm, ExpertNames(), reader, self._path)

    @property
    def num_bytes(self) -> int:
        return self._mixture.weight_bytes

    def add(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """Adds the mixture's output to the tokens of the rank's own replica. tokens: of all replicas."""
        x_TE = tokens[self._groups.data.rank].clone()
        self._run(x_TE, [len(each) for each in tokens])
        return x_TE

    def delta(self, tokens_TE: torch.Tensor) -> torch.Tensor:
        """The mixture's output on a GPU, not yet added."""
        stream = Residual(tokens_TE.to(DEVICE), torch.zeros_like(tokens_TE, device=DEVICE))
        self._run(stream, [len(tokens_TE)])
        return stream.delta_TE

    def _run(self, stream: Stream, num_tokens_D: Sequence[int]) -> None:
        context = ForwardContext(
            kv_cache=KVCache(self._config, num_blocks=2, block_size=8, backend=WHOLE_PATH),
            slots_T=torch.empty(0),
            cos_sin_tables=(),
            attention_plans={},
            workspace=Workspace(self._path),
            groups=self._groups,
            num_tokens_D=num_tokens_D,
            expert_load=self._load,
        )
        with torch.inference_mode(), forward_context(context):
            x = ResidualStream(stream)
            x = x + self._mixture(self._norm(x))


def _tokens(counts: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(count, HIDDEN_SIZE, generator=generator) for count in counts]


@pytest.mark.parametrize(
    ("tensor_size", "data_size", "num_experts"), [(1, 2, 6), (2, 2, 5), (3, 1, 7)], ids=lambda value: f"{value}"
)
def test_a_token_has_the_bits_of_one_rank_whatever_way_it_takes(
    tmp_path: Path, tensor_size: int, data_size: int, num_experts: int
) -> None:
    steps = [_tokens(counts[:data_size]) for counts in ((7, 3), (1, 0), (0, 9), (70, 31), (2, 90))]
    axes = Axes(tensor_size=tensor_size, data_size=data_size)
    assert {sum(map(len, step)) > GATHERED_TOKENS for step in steps} == {False, True}

    def run(replica: int, rank: int, groups: Groups) -> list[torch.Tensor]:
        mixture = Mixture(num_experts, 3, groups)
        return [mixture.add(tokens) for tokens in steps]

    alone = Mixture(num_experts, 3, Groups())
    for replica, ranks in enumerate(run_replicas(tmp_path, axes, run)):
        for tokens, *added in zip(steps, *ranks, strict=True):
            expected = alone.add([tokens[replica]])
            assert all(torch.equal(each, expected) for each in added)


def test_experts_with_many_tokens_are_copied_and_no_bit_changes(tmp_path: Path) -> None:
    """Two copies for four ranks, chosen at the third step and, for other tokens, again at the sixth."""
    path, num_experts = cpu_backend(torch.float32, 8), 6
    steps = [[tokens.expand(count, -1).contiguous() for count in (9, 40)] for tokens in _tokens([1] * 8)]

    def run(replica: int, rank: int, groups: Groups) -> tuple[list[torch.Tensor], list[int]]:
        mixture, added, sizes = Mixture(num_experts, 2, groups, path, num_redundant=2), [], []
        for step, tokens in enumerate(steps, 1):
            groups.begin_step(step)
            added.append(mixture.add(tokens))
            sizes.append(mixture.num_bytes)
        return added, sizes

    alone = Mixture(num_experts, 2, Groups(), path)
    said = run_replicas(tmp_path, Axes(tensor_size=2, data_size=2), run)
    for replica, ranks in enumerate(said):
        for added, _ in ranks:
            assert all(
                torch.equal(each, alone.add([tokens[replica]])) for each, tokens in zip(added, steps, strict=True)
            )
    sizes = [sizes for ranks in said for _, sizes in ranks]
    # The ranks are home to 2, 2, 1 and 1 of six experts; the last two have room for a copy each.
    assert [each[2] > each[1] for each in sizes] == [False, False, True, True]
    assert all(each[7] == each[2] for each in sizes)


def _sent(groups: Sequence[Group]) -> list[tuple[int, int]]:
    return [(group.num_calls, group.num_bytes) for group in groups if isinstance(group, GlooGroup)]


@pytest.mark.parametrize("num_tokens", [8, 40])
def test_what_a_mixture_sends_is_what_the_docs_say(tmp_path: Path, num_tokens: int) -> None:
    """See docs/architecture.md. Each token has an expert on each rank, so that the number of bytes does not depend on
    routing."""
    axes, top_k, size = Axes(tensor_size=2, data_size=2), 4, HIDDEN_SIZE * 4
    tensor, data, ranks = axes.tensor_size, axes.data_size, axes.num_ranks

    def run(replica: int, rank: int, groups: Groups) -> list[tuple[int, int]]:
        Mixture(top_k, top_k, groups).add(_tokens([num_tokens] * data))
        return _sent((groups.tensor, groups.data, groups.experts))

    if data * num_tokens <= GATHERED_TOKENS:
        sent = [
            (0, 0),
            (1, (data - 1) * num_tokens * (size + 4 * top_k)),
            (1, num_tokens * top_k * (ranks - 1) // ranks * size),
        ]
    else:
        elsewhere = ranks - tensor
        sent = [
            (1, (tensor - 1) * num_tokens // tensor * size),
            (1, (data - 1) * num_tokens * 4 * top_k),
            (2, num_tokens // tensor * (elsewhere + top_k * (ranks - 1) // ranks) * size),
        ]
    assert run_replicas(tmp_path, axes, run) == [[sent] * tensor] * data


# Rows of another rank's pairs are also computed, from uninitialized memory, but not stored.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ranks_on_gpus_add_up_what_their_own_experts_give() -> None:
    """Each rank runs alone here, and gives its own part as it is before ranks add up."""
    [tokens], path = _tokens([5]), gpu_backend(torch.float32, torch.device(DEVICE))

    def of_rank(rank: int) -> torch.Tensor:
        group = Rehearsal(rank, 2)
        return Mixture(5, 3, Groups(tensor=group, experts=group), path).delta(tokens)

    expected = Mixture(5, 3, Groups(), path).delta(tokens)
    parts = [of_rank(rank) for rank in range(2)]
    assert all(part.any() for part in parts)
    torch.testing.assert_close(parts[0] + parts[1], expected, rtol=1e-5, atol=1e-5)
