"""NcclGroup's calls to torch's process group. A gloo group replaces it and records the calls, which have the same
signatures (both are torch's Backend)."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore, Store

from configs.load import load_options
from worker.errors import CollectiveError
from worker.parallel import gloo, nccl
from worker.parallel.gloo import GlooGroup
from worker.parallel.nccl import NcclGroup, tensor_group_class

GPU = torch.device("cuda", 1)


class InPlaceOfNccl:
    """A ProcessGroupNCCL without watchdog: a synchronous call returns no Work and is complete."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._gloo = gloo.connect("gloo", store, rank, size, host="127.0.0.1", connect_timeout=60, call_timeout=60)
        self.timeout, self.calls, self.fails = timeout, list[str](), False

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(f"connect {device}")

    def abort(self) -> None:
        self.calls.append("abort")

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            *_, options = args
            assert not options.asyncOp, "it would run beside the stream, and its tensors might be gone"
            if self.fails:
                raise RuntimeError("NCCL error: remote process exited\nof no interest")
            self.calls.append(name)
            getattr(self._gloo, name)(*args).wait()

        return call


def _ranks(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    size: int,
    of_rank: Callable[[NcclGroup, InPlaceOfNccl], Any],
    *,
    batch_invariant: bool = False,
) -> list[Any]:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(nccl, "_process_group", InPlaceOfNccl)

    # One that fails at once would close its connections while another still makes them.
    all_connected = Barrier(size)

    def rank(number: int) -> Any:
        group = NcclGroup(
            "tensor group",
            FileStore(str(directory / "store"), size),
            number,
            size,
            device=GPU,
            batch_invariant=batch_invariant,
            host="127.0.0.1",
            connect_timeout=60,
            call_timeout=30,
        )
        all_connected.wait(60)
        return of_rank(group, group._group)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def test_its_calls_are_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def of_rank(group: NcclGroup, inside: InPlaceOfNccl) -> None:
        x = torch.tensor([1.0, 2.0]) + group.rank
        group.sum_(x)
        assert x.tolist() == [3.0, 5.0]
        assert group.gather(torch.tensor([group.rank])).tolist() == [[0], [1]]
        # One row goes to rank 0, two to rank 1.
        rows = torch.arange(6.0).view(3, 2) + 10 * group.rank
        received = [1, 1] if group.rank == 0 else [2, 2]
        arrived = group.exchange(rows, [1, 2], received)
        own = slice(0, 1) if group.rank == 0 else slice(1, 3)
        assert torch.equal(arrived, torch.cat([(torch.arange(6.0).view(3, 2) + 10 * sender)[own] for sender in (0, 1)]))
        assert inside.calls == ["connect cuda:1", "allreduce", "_allgather_base", "alltoall_base"]
        assert inside.timeout == timedelta(seconds=30)
        assert group.num_calls == 3
        # 8 bytes that a ring sends for the sum, 8 for the gather, and 8 for each row that goes to the other rank.
        assert group.num_bytes == 8 + 8 + (16 if group.rank == 0 else 8)

    _ranks(monkeypatch, tmp_path, 2, of_rank)


def test_batch_invariant_sums_are_added_up_in_the_order_of_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sums are float32 and rounded once: 256 + 1 + 1 is 258; in bfloat16 each addition would leave 256."""

    def of_rank(group: NcclGroup, inside: InPlaceOfNccl) -> tuple[list[str], float]:
        x = torch.tensor([256.0 if group.rank == 0 else 1.0]).bfloat16()
        group.sum_(x)
        return inside.calls[1:], x.item()

    said = _ranks(monkeypatch, tmp_path, 3, of_rank, batch_invariant=True)
    assert said == [(["_allgather_base"], 258.0)] * 3


def test_what_fails_says_where_and_who_has_left_cannot_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def of_rank(group: NcclGroup, inside: InPlaceOfNccl) -> None:
        group.step, inside.fails = 7, True
        with pytest.raises(CollectiveError, match=f"in step 7 failed at rank {group.rank}: NCCL error.*exited$"):
            group.sum_(torch.ones(1))
        group.leave()
        group.leave()
        assert inside.calls == ["connect cuda:1", "abort"]
        with pytest.raises(CollectiveError, match=f"in step 7: rank {group.rank} has left"):
            group.gather(torch.ones(1))

    _ranks(monkeypatch, tmp_path, 2, of_rank)


def test_who_computes_on_a_gpu_is_connected_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    options = load_options(flags={"tensor_parallel_size": 2, "batch_invariant": True}, environ={})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert tensor_group_class(options, 0, 1) is GlooGroup
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    connects = tensor_group_class(options, 0, 1)
    assert isinstance(connects, partial)
    assert (connects.func, connects.keywords) == (NcclGroup, {"device": GPU, "batch_invariant": True})
