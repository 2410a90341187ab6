"""Ranks that find each other over tcp: at a single address, with a wait that can be interrupted."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from configs.options import Options
from worker.errors import CollectiveError, PermanentError, PlanError
from worker.parallel import group_init as group_init_module
from worker.parallel.axes import axes_of
from worker.parallel.group_init import GroupInit

OPTIONS = Options(
    tensor_parallel_size=2, step_addresses=("tcp://127.0.0.1:7000",), curve_dir="keys", step_timeout=20, metrics_port=0
)


class Overtaken(Exception):
    pass


def meeting(rank: int, options: Options = OPTIONS) -> GroupInit:
    return GroupInit(options, axes_of(options), 0, rank, lambda: None)


def after(count: int) -> Callable[[], None]:
    """A callback for waiting that raises Overtaken at the count-th call."""
    calls = iter(range(count - 1))

    def look() -> None:
        if next(calls, None) is None:
            raise Overtaken

    return look


def test_ranks_meet_in_one_epoch_after_the_other_at_one_store() -> None:
    """A rank that an earlier epoch left waiting at the store does not disturb the next epoch."""
    ranks = [meeting(0), meeting(1)]
    place = f"tcp:{ranks[0].store_address}"
    assert ranks[1].store_address == ""
    with pytest.raises(Overtaken):
        ranks[1](f"{place}/1", after(3))

    def sum_of_ranks(rank: int) -> float:
        for epoch in (2, 3):
            groups = ranks[rank](f"{place}/{epoch}", lambda: None)
            x = torch.full((3,), rank + 1.0)
            groups.tensor.sum_(x)
            groups.leave()
        return float(x[0])

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(sum_of_ranks, range(2))) == [3.0, 3.0]


def test_a_store_listens_at_the_one_address_that_leads_to_the_scheduler() -> None:
    holder = meeting(0)
    host, _, port = holder.store_address.rpartition(":")
    assert host == "127.0.0.1"
    listening = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening if address.port == int(port)} == {"127.0.0.1"}
    with pytest.raises(PermanentError, match=r"worker_host='192\.0\.2\.77'.*an address of this machine"):
        meeting(0, OPTIONS.model_copy(update={"worker_host": "192.0.2.77"}))


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a store whose process has been stopped, or whose machine has vanished: connections succeed, for
    the system accepts them by itself, but nothing answers. Threads left waiting there have ended afterwards."""
    monkeypatch.setattr(group_init_module, "_TIMEOUT_S", 0.2)
    before = threading.enumerate()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    for thread in set(threading.enumerate()) - set(before):
        thread.join(30)
        assert not thread.is_alive()


def test_a_rank_leaves_a_store_that_is_silent_when_it_is_told_to(silent: str) -> None:
    before = threading.enumerate()
    with pytest.raises(Overtaken):
        meeting(1)(f"tcp:{silent}/1", after(5))
    (left,) = set(threading.enumerate()) - set(before)
    assert left.daemon, "the process could not end"


def test_a_store_that_has_gone_is_a_consequence_and_a_place_that_is_none_breaks_the_wire() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(CollectiveError, match=f"the ranks' store at tcp:{gone}/1 is not there any more: Conn"):
        meeting(1)(f"tcp:{gone}/1", lambda: None)
    for place in ("tcp:/1", "tcp:127.0.0.1:7", "udp:x", "file:"):
        with pytest.raises(PlanError, match="rendezvous"):
            meeting(1)(place, lambda: None)
