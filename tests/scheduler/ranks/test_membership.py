"""What ranks of a replica must agree on, and what the scheduler takes the least of."""

from pathlib import Path

import pytest

from configs.options import Options
from protos import inference_pb2
from scheduler.ranks.epochs import RendezvousFiles, rendezvous_of
from scheduler.ranks.membership import MembershipError, Terms
from scheduler.sockets import AddressClaims, AddressError

OPTIONS = Options(tensor_parallel_size=2, block_size=16)


def info(**changes: object) -> inference_pb2.ModelInfo:
    fields: dict = {"name": "m", "dtype": "float32", "block_size": 16, "num_blocks": 9, "max_model_len": 64} | changes
    return inference_pb2.ModelInfo(**fields)


def test_the_least_of_all_ranks_counts() -> None:
    # On GPUs each rank has as many blocks as its own memory leaves.
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
    # Even if no socket is in it.
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
