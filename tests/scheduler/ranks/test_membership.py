"""Which processes may be ranks, what the ranks of a replica must agree on, and where they meet."""

from pathlib import Path

import pytest

from configs.options import Options
from protos import inference_pb2, step_pb2
from runtime.wire import PROTOCOL_VERSION, octavo_version
from scheduler.ranks.epochs import RendezvousFiles, rendezvous_of
from scheduler.ranks.membership import Joined, Membership, MembershipError, Rank, Refused, Returned, Terms
from scheduler.sockets import AddressClaims, AddressError

OPTIONS = Options(tensor_parallel_size=2, block_size=16)


def info(**changes: object) -> inference_pb2.ModelInfo:
    fields: dict = {"name": "m", "dtype": "float32", "block_size": 16, "num_blocks": 9, "max_model_len": 64} | changes
    return inference_pb2.ModelInfo(**fields)


def test_the_least_of_all_ranks_counts() -> None:
    # On GPUs each rank's number of blocks depends on its own free memory.
    agreed = Terms.of(OPTIONS).agree([info(max_model_len=144), info(num_blocks=4), info(num_blocks=7)], None)
    assert agreed == info(num_blocks=4, max_model_len=64)


def test_ranks_of_different_models_are_refused_with_the_rank_and_both_values() -> None:
    with pytest.raises(MembershipError, match="dtype is 'bfloat16' at rank 1 but 'float32' at rank 0"):
        Terms.of(OPTIONS).agree([info(), info(dtype="bfloat16")], None)


def test_the_first_rank_of_the_last_stage_returns_results() -> None:
    assert Terms.of(OPTIONS).results_rank == 0


def test_files_go_once_nobody_waits_at_them(tmp_path: Path) -> None:
    files = RendezvousFiles(tmp_path, 1)
    paths = [Path(files.address(epoch).removeprefix("file:")) for epoch in (7, 8, 9)]
    others = [Path(RendezvousFiles(tmp_path, 0).address(7).removeprefix("file:")), tmp_path / "step-1.sock"]
    for path in (*paths, *others):
        path.touch()
    files.remove_all_but(9)
    assert sorted(tmp_path.iterdir()) == sorted([paths[2], *others])
    files.remove_all_but(None)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_ranks_meet_in_no_directory_that_others_can_write_to(tmp_path: Path) -> None:
    # Such a directory is refused even if it contains no socket.
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    options = Options(
        runtime_dir=shared,
        step_addresses=(f"ipc://{sockets}/step",),
        scheduler_addresses=(f"unix:{sockets}/scheduler",),
        tensor_parallel_size=2,
    )
    with pytest.raises(AddressError, match="is open to others"):
        AddressClaims(options, 0)
    AddressClaims(options.model_copy(update={"tensor_parallel_size": 1}), 0).release()


def test_ranks_of_several_machines_meet_at_the_store_that_the_first_one_told() -> None:
    tcp = {"step_addresses": ("tcp://10.0.0.1:7000",), "curve_dir": "keys"}
    meeting = rendezvous_of(Options(tensor_parallel_size=2, **tcp), 0)
    assert meeting is not None
    assert meeting.address(7, "10.0.0.2:4000") == "tcp:10.0.0.2:4000/7"
    assert isinstance(rendezvous_of(Options(tensor_parallel_size=2), 0), RendezvousFiles)
    assert rendezvous_of(Options(**tcp), 0) is None


def hello(rank: int, *, instance: int, model: str = "m") -> step_pb2.Hello:
    return step_pb2.Hello(
        rank=rank,
        instance=instance,
        pid=instance,
        protocol_version=PROTOCOL_VERSION,
        octavo_version=octavo_version(),
        world_size=2,
        model=model,
        block_size=16,
        max_num_seqs=OPTIONS.max_num_seqs,
        max_num_batched_tokens=OPTIONS.max_num_batched_tokens,
    )


def alive(rank: Rank) -> bool:
    return True


def dead(rank: Rank) -> bool:
    return False


def test_ranks_join_once_and_the_first_one_names_the_model() -> None:
    membership = Membership(Terms.of(OPTIONS))
    joined = membership.admit(hello(1, instance=11), b"join-1", 0.0, is_rightful=alive)
    assert isinstance(joined, Joined)
    assert joined.before is None
    assert membership.missing == [0]
    assert membership.admit(hello(1, instance=11), b"join-1", 1.0, is_rightful=alive) is None
    refused = membership.admit(hello(0, instance=12, model="other"), b"join-2", 1.0, is_rightful=alive)
    assert isinstance(refused, Refused)
    assert refused.permanent
    assert "served_model_name is 'other'" in refused.reason
    membership.admit(hello(0, instance=13), b"join-3", 1.0, is_rightful=alive)
    assert membership.have_entered


def test_a_process_that_connects_anew_is_the_rank_that_it_was() -> None:
    membership = Membership(Terms.of(OPTIONS))
    membership.admit(hello(0, instance=11), b"join-1", 0.0, is_rightful=alive)
    returned = membership.admit(hello(0, instance=11), b"join-2", 1.0, is_rightful=dead)
    assert isinstance(returned, Returned)
    assert returned.rank is membership.ranks[0]


def test_a_rank_is_replaced_only_if_its_process_does_not_live() -> None:
    membership = Membership(Terms.of(OPTIONS))
    membership.admit(hello(0, instance=11), b"join-1", 0.0, is_rightful=alive)
    refused = membership.admit(hello(0, instance=12), b"join-2", 1.0, is_rightful=alive)
    assert isinstance(refused, Refused)
    assert not refused.permanent
    assert membership.ranks[0].instance == 11
    joined = membership.admit(hello(0, instance=12), b"join-2", 1.0, is_rightful=dead)
    assert isinstance(joined, Joined)
    assert joined.before is not None
    assert joined.before.instance == 11
    assert membership.ranks[0] is joined.rank


def test_features_are_those_of_all_ranks_and_none_is_lost() -> None:
    """A rank that lacks one would ignore the field that needs it."""
    membership = Membership(Terms.of(OPTIONS))
    ranks = [Rank(rank=number, instance=number, pid=number, identity=b"") for number in range(2)]
    membership.ranks.update(enumerate(ranks))
    for rank, features in zip(ranks, ({"a", "b"}, {"b"}), strict=True):
        rank.model, rank.features = info(), frozenset(features)
    assert membership.agree()
    assert membership.features == {"b"}
    assert not membership.holds_constrained
    ranks[1].holds_constrained = True
    assert membership.holds_constrained
    ranks[1].max_logprobs = 64
    assert membership.max_logprobs == 20
    ranks[1].features = frozenset({"b", "c"})
    assert membership.agree()
    ranks[0].features = frozenset({"a"})
    with pytest.raises(MembershipError, match="a worker lacks b"):
        membership.agree()


def test_workers_choose_the_size_of_blocks_for_layers_with_a_state_unless_one_is_given():
    models = [info(block_size=512, carries_states=True)] * 2
    assert Terms.of(Options(tensor_parallel_size=2)).agree(models, None).block_size == 512
    with pytest.raises(MembershipError, match="block_size is 512 at the workers, not 16"):
        Terms.of(OPTIONS).agree(models, None)
    with pytest.raises(MembershipError, match="block_size is 512 at the workers, not 16"):
        Terms.of(Options(tensor_parallel_size=2)).agree([info(block_size=512)] * 2, None)
