"""The gain of prefix-aware routing: the router's policy, Sessions and real scheduling cores under a virtual clock."""

from benchmarks.router.prefix_routing import make_requests
from benchmarks.router.virtual_cluster import Served, StepTime, VirtualCluster
from router.replicas.policies import POLICIES
from scheduler.core.messages import CoreSettings


def _served(policy: str, workload: str, num_blocks: int) -> Served:
    """Serves a quarter of the benchmark's prefixes."""
    requests = make_requests(workload, seed=1, count=150, num_prefixes=32)
    settings = CoreSettings(
        block_size=16, num_blocks=num_blocks, max_model_len=8192, max_num_seqs=128, max_num_batched_tokens=2048
    )
    cluster = VirtualCluster(POLICIES[policy](), num_replicas=4, settings=settings, step_time=StepTime())
    cluster.serve(requests)
    return Served(requests=requests)


def test_shared_prefixes_are_found_twice_as_often_as_in_turns_and_first_tokens_come_sooner() -> None:
    # A router with neither cache events nor a history of its own finds 29%, as few as round robin does.
    # Each replica has blocks for half of the prefixes.
    aware, in_turn = (_served(policy, "shared", 1024) for policy in ("prefix_aware", "round_robin"))
    assert aware.hit_rate > 2 * in_turn.hit_rate
    assert aware.ttft_ms(50) < 0.8 * in_turn.ttft_ms(50)


def test_prompts_that_share_nothing_lose_nothing() -> None:
    # They lost when a Load left out the prefill in flight: the next prompt was sent behind it.
    aware, in_turn = (_served(policy, "nothing", 4096) for policy in ("prefix_aware", "round_robin"))
    assert aware.hit_rate == 0
    assert aware.output_tokens_per_second > 0.98 * in_turn.output_tokens_per_second
    assert aware.ttft_ms(50) < 1.02 * in_turn.ttft_ms(50)
