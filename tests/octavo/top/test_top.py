"""`octavo top`, driven by Textual's pilot: what is shown, and that nothing changes without a yes."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from rich.text import Text
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from octavo.client.admin import Admin, Explanation, Migration, RequestTimeline, TimelineEntry
from octavo.client.errors import RequestNotFound, Unavailable
from octavo.top.app import Confirm, Explained, Top
from octavo.top.rows import replica_row, request_row
from protos import admin_pb2 as pb
from runtime.telemetry.rates import ReplicaRates


class FakeAdmin(Admin):
    """A cluster of two replicas; notes what is asked of it."""

    def __init__(self) -> None:
        self.done: list[tuple[str, ...]] = []
        self.is_lost = False
        self.num_tokens = 0
        self.requests = ["first", "second"]
        self.stopped: pb.ReplicaView | None = None

    def observe(self) -> pb.ObserveResponse:
        if self.is_lost:
            raise Unavailable("the connection broke")
        self.num_tokens += 500
        view = self._view()
        if self.stopped is not None:
            view.replicas[1].CopyFrom(self.stopped)
        return view

    def _view(self) -> pb.ObserveResponse:
        return pb.ObserveResponse(
            router=pb.RouterView(router_id="r", model="a-model", num_output_tokens=self.num_tokens, num_streams=2),
            replicas=[
                pb.ReplicaView(
                    address=f"unix:/{number}",
                    replica_id=str(number),
                    state=state,
                    is_observed=True,
                    num_running=3,
                    num_blocks=100,
                    num_available_blocks=75,
                    ranks=[pb.RankView(rank=0, state="stepping")],
                )
                for number, state in enumerate(("ready", "paused"))
            ],
            requests=[
                pb.RequestView(request_id=each, replica_id="0", age=2.0, time_to_first_token=-1)
                for each in self.requests
            ],
        )

    def explain(self, request_id: str) -> Explanation:
        if request_id == "second":
            raise RequestNotFound("no replica knows it")
        entries = tuple(
            TimelineEntry(moment=moment, time=at, choice=0, step=1, num_tokens=7, reason="")
            for moment, at in (("queued", 0.0), ("admitted", 1.0), ("decoding", 2.0))
        )
        timeline = RequestTimeline(
            request_id=request_id, replica_id="0", entries=entries, num_dropped=0, finished=False, now=3.0
        )
        return Explanation(timelines=(timeline,), unreachable=())

    def migrate(self, request_id: str, replica: str = "") -> Migration:
        self.done.append(("migrate", request_id))
        return Migration(moved_from="unix:/0", moved_to="unix:/1", num_output_tokens=12)

    def hold(self, replica: str, state: str) -> int:
        self.done.append((state, replica))
        return 3


def line(app: Top, name: str) -> str:
    content = app.screen_stack[0].query_one(name, Static).content
    return content.plain if isinstance(content, Text) else str(content)


def table(app: Top, name: str) -> DataTable[Text]:
    return app.screen_stack[0].query_one(name, DataTable)


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await pilot.pause(0.02)


@pytest.fixture
def admin() -> FakeAdmin:
    return FakeAdmin()


@pytest.fixture
def app(admin: FakeAdmin) -> Top:
    return Top(admin, "here:1", interval=0.05)


async def test_both_tables_follow_the_cluster_at_80_by_24(app: Top, admin: FakeAdmin) -> None:
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: table(app, "#requests").row_count == 2 and "0 tok/s" not in line(app, "#summary"))
        assert line(app, "#summary").startswith("a-model at here:1")
        replicas = table(app, "#replicas")
        assert [cell.plain for cell in replicas.get_row("unix:/0")[:5]] == ["0", "ready", "3", "0", "25%"]
        # All columns can be seen: the table is no wider than the screen.
        assert replicas.virtual_size.width <= 80
        assert "rank 0 stepping" in line(app, "#steps")
        admin.requests = ["second", "third"]
        await until(pilot, lambda: "third" in {str(row.value) for row in table(app, "#requests").rows})
        assert {str(row.value) for row in table(app, "#requests").rows} == {"second", "third"}


async def test_a_replica_in_quarantine_is_shown_with_its_cause(app: Top, admin: FakeAdmin) -> None:
    cause = "unix:/1: in quarantine, tried again in 43 s: worker 1.0 was killed by SIGKILL."
    admin.stopped = pb.ReplicaView(address="unix:/1", state="quarantined", description=cause)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: cause in line(app, "#steps"))
        replicas = table(app, "#replicas")
        assert replicas.get_row("unix:/1")[1] == Text("quarantined", "red")
        assert replicas.virtual_size.width <= 80


@pytest.mark.parametrize(("key", "state"), [("p", "paused"), ("d", "drained"), ("r", "none")])
async def test_a_replica_is_held_after_a_yes_and_only_then(app: Top, admin: FakeAdmin, key: str, state: str) -> None:
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: table(app, "#replicas").row_count == 2)
        await pilot.press("down", key)
        assert isinstance(app.screen, Confirm)
        await pilot.press("n")
        assert admin.done == []
        await until(pilot, lambda: line(app, "#note") == "nothing was changed")
        # Other keys do nothing while the question stands.
        await pilot.press(key, "enter", key)
        assert isinstance(app.screen, Confirm)
        assert len(app.screen_stack) == 2
        await pilot.press("y")
        await until(pilot, lambda: bool(admin.done))
        assert admin.done == [(state, "unix:/1")]
        await until(pilot, lambda: "3 streams here" in line(app, "#note"))


async def test_a_request_is_moved_and_explained(app: Top, admin: FakeAdmin) -> None:
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: table(app, "#requests").row_count == 2)
        await pilot.press("tab")
        assert table(app, "#requests").has_focus
        await pilot.press("m", "y")
        await until(pilot, lambda: line(app, "#note") == "moved after 12 tokens, from replica 0 to 1")
        assert admin.done == [("migrate", "first")]
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Explained))
        shown = str(app.screen.query(Static).first().content)
        assert "request first on replica 0" in shown
        assert "decode" in shown
        await pilot.press("escape", "down", "enter")
        await until(pilot, lambda: "no replica knows it" in line(app, "#note"))


async def test_a_lost_router_is_told_and_asked_again(app: Top, admin: FakeAdmin) -> None:
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: table(app, "#replicas").row_count == 2)
        admin.is_lost = True
        await until(pilot, lambda: "the connection broke; asking again" in line(app, "#note"))
        before, admin.is_lost = admin.num_tokens, False
        await until(pilot, lambda: admin.num_tokens > before)


async def test_a_router_that_hangs_leaves_the_keys_alive(admin: FakeAdmin) -> None:
    asked, release = threading.Event(), threading.Event()
    answer = admin.observe()

    def hang() -> pb.ObserveResponse:
        asked.set()
        release.wait(20)
        return answer

    admin.observe = hang  # type: ignore[method-assign]
    app = Top(admin, "here:1", interval=0.05)
    async with app.run_test(size=(80, 24)) as pilot:
        await asyncio.to_thread(asked.wait, 20)
        await pilot.press("p")
        await until(pilot, lambda: line(app, "#note") == "no replica is chosen")
        release.set()


def test_ids_and_addresses_cannot_move_the_cursor() -> None:
    request = pb.RequestView(request_id="a\x1b[2J\u202eb", replica_id="0", time_to_first_token=-1)
    assert request_row(request)[0].plain == "a?[2J?b"
    assert replica_row(pb.ReplicaView(address="unix:/\x07x"), ReplicaRates())[0].plain == "unix:/?x"
