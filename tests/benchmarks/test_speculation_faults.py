"""The streams of `benchmarks.faults --traffic drafts`, and replicas that draft in different ways."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.faults.means.up_with import with_flags
from benchmarks.faults.traffics.speculation import make_speculated_plans, own_flags, without_speculation
from configs.flags import parse_flags
from configs.load import load_options
from configs.options import Options
from octavo.cluster.processes import Stage


def test_streams_have_all_features() -> None:
    plans = make_speculated_plans(200, 1, mean_tokens=80)
    kinds = Counter(plan.kind for plan in plans)
    assert kinds["edit"] >= 60
    assert kinds["plain"] >= 60
    assert len(kinds) >= 8
    samplings = [plan.sampling for plan in plans]
    assert sum(each.temperature != 0 for each in samplings) == 100
    for feature in ("logprobs", "prompt_logprobs", "stop", "repetition_penalty", "constraint"):
        assert any(getattr(each, feature) for each in samplings), feature
    assert {each.n for each in samplings} == {1, 2, 3}
    assert all(without_speculation(plan).sampling.num_speculative_tokens == 0 for plan in plans)


@pytest.mark.parametrize(
    ("drafters", "methods"), [("scheduler", ["ngram", "suffix"]), ("workers", ["draft_model", "eagle3"])]
)
def test_each_replica_has_its_own_drafter(tmp_path: Path, drafters: str, methods: list[str]) -> None:
    processes = with_flags(own_flags(drafters, tmp_path))
    found = []
    for spec in processes(Options(data_parallel_size=2), tmp_path / "none.yaml", num_cores=2):
        if spec.stage is Stage.ROUTER:
            assert "--speculative-config" not in spec.command
        else:
            _, flags, numbers = parse_flags([*spec.command[5:]], ("replica", "rank"))
            config = load_options(None, flags).speculative_config
            assert config is not None
            found.append((int(numbers["replica"]), spec.stage, config.method))
    assert found == [(i, stage, methods[i]) for stage in (Stage.WORKER, Stage.SCHEDULER) for i in range(2)]
