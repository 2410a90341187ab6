"""A cluster on Ray without Ray: where its processes are placed, what they are started with, and which ones move
when a node is lost. Actors are stand-ins that record their calls."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from configs.options import Options
from octavo.cluster.display import Display
from octavo.cluster.errors import ClusterError, ProcessFailed
from octavo.cluster.processes import Stage, cluster_processes
from octavo.ray import fleet
from octavo.ray.actors import ActorGone, RayActor, RayActors
from octavo.ray.fleet import RayFleet, check
from octavo.ray.placement import GroupPlan, Resources, needs_of, plan_placement

OPTIONS = Options(data_parallel_size=2, tensor_parallel_size=2, worker_threads=2, device="cpu", metrics_port=0)
KEYS = {
    name: name for name in ("worker.key_secret", "scheduler.key", "scheduler.key_secret", "allowed_workers/worker.key")
}


class StandInActor(RayActor):
    def __init__(self, name: str, node: str) -> None:
        self.name, self.node = name, node
        self.runs: list[dict[str, Any]] = []
        self.files: dict[str, str] = {}
        self.is_killed = False
        self._ending: asyncio.Future[str] = asyncio.Future()

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self, method)(*args, **kwargs)

    async def place(self, num_ports: int = 0, before: tuple[str, int] = ("", 0)) -> tuple[str, str, int]:
        number = int(self.node.removeprefix("node "))
        return self.node, f"10.0.0.{number}", 7000 + number if num_ports else 0

    async def write(self, name: str, text: str) -> None:
        self.files[name] = text

    async def run(self, arguments: Sequence[str], options: str, files: dict[str, str], **settings: Any) -> str:
        self.runs.append({**yaml.safe_load(options), "arguments": tuple(arguments), "files": set(files)})
        self._ending = asyncio.Future()
        return await self._ending

    async def news(self) -> list[tuple[str, str]]:
        return await asyncio.Future()

    async def stop(self, grace: float) -> None:
        self.end("")

    async def clean_up(self) -> None:
        pass

    @property
    def has_ended(self) -> bool:
        return self._ending.done()

    def end(self, cause: str) -> None:
        if not self._ending.done():
            self._ending.set_result(cause)

    def move(self, node: str) -> None:
        """Simulates the loss of its node: Ray restarts the actor on another."""
        self.node = node
        self._ending.set_exception(ActorGone("ActorUnavailableError"))

    def kill(self) -> None:
        self.is_killed = True


class StandInActors(RayActors):
    def __init__(self, has_room: bool = True) -> None:
        self.has_room = has_room
        self.by_name: dict[str, StandInActor] = {}
        self.asked: dict[str, Resources] = {}

    async def place(self, groups: Sequence[GroupPlan]) -> None:
        if not self.has_room:
            await asyncio.Future()

    def start(self, name: str, stage: Stage, at: tuple[int, int], resources: Resources) -> StandInActor:
        self.asked[name] = resources
        self.by_name[name] = StandInActor(name, f"node {1 + at[1]}")
        return self.by_name[name]

    def start_here(self, name: str, stage: Stage) -> StandInActor:
        return self.start(name, stage, (0, -1), {"CPU": 1})


class Running:
    """A fleet of stand-ins in the test's event loop."""

    def __init__(self, has_room: bool = True, **options: float) -> None:
        self.actors, self.output = StandInActors(has_room), StringIO()
        chosen = OPTIONS.model_copy(update=options)
        specs = cluster_processes(chosen, Path("options.yaml"), num_cores=2)
        needs = needs_of(chosen, has_gpus=False)
        plan = plan_placement(needs, 2, [{"CPU": 8.0}])
        display = Display(specs, Console(file=self.output, width=200), verbose=False)
        self.fleet = RayFleet(chosen, self.actors, plan, needs, KEYS, display, specs)
        self.task = asyncio.create_task(self.fleet.run())

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                assert not self.task.done(), self.output.getvalue()
                await asyncio.sleep(0)

    def __getitem__(self, name: str) -> StandInActor:
        return self.actors.by_name[name]


@pytest.fixture
async def running() -> Running:
    return await _running()


async def _running(**options: float) -> Running:
    running = Running(has_room=True, **options)
    names = {"router", *(f"scheduler {i}" for i in (0, 1)), *(f"worker {i}.{rank}" for i in (0, 1) for rank in (0, 1))}
    await running.until(lambda: running.actors.by_name.keys() == names and all(running[n].runs for n in names))
    await running.until(lambda: len(running["router"].files) == 2)
    return running


NAMES = {replica: (f"worker {replica}.0", f"worker {replica}.1", f"scheduler {replica}") for replica in (0, 1)}
CAUSE = "worker 1.0 ended with exit code 2. Its last words:\n  the GPU fell off the bus"


async def test_each_process_knows_where_its_scheduler_is_and_has_the_keys_that_it_needs(running: Running) -> None:
    worker, scheduler = running["worker 1.1"].runs[0], running["scheduler 1"].runs[0]
    assert worker["arguments"] == ("--replica", "1", "--rank", "1")
    assert worker["step_addresses"] == scheduler["step_addresses"] == ["tcp://10.0.0.2:7003"] * 2
    assert scheduler["scheduler_addresses"] == ["10.0.0.2:7002"] * 2
    assert worker["worker_host"] == "10.0.0.2"
    assert worker["files"] == {"keys/worker.key_secret", "keys/scheduler.key"}
    assert scheduler["files"] == {"keys/scheduler.key_secret", "keys/allowed_workers/worker.key"}
    router = running["router"]
    assert router.runs[0]["scheduler_addresses"] == [f"file:{{directory}}/scheduler-{i}" for i in (0, 1)]
    assert router.runs[0]["files"] == set(), "it needs no keys"
    assert router.files == {"scheduler-0": "10.0.0.1:7001", "scheduler-1": "10.0.0.2:7002"}
    for run in (router.runs[0], worker, scheduler):
        Options(**{name: value for name, value in run.items() if name not in ("arguments", "files")})
    running.task.cancel()


async def test_all_follow_a_scheduler_to_another_node(running: Running) -> None:
    """The whole replica loses its node. Its workers return before the scheduler's new address is known."""
    for name in ("worker 1.0", "worker 1.1", "scheduler 1"):
        running[name].move("node 5")
    await running.until(lambda: running["router"].files["scheduler-1"] == "10.0.0.5:7005")
    workers = [running[f"worker 1.{rank}"] for rank in (0, 1)]
    await running.until(lambda: all(each.runs[-1]["step_addresses"][1] == "tcp://10.0.0.5:7006" for each in workers))
    assert len(running["worker 0.0"].runs) == len(running["router"].runs) == 1, "the others go on"
    assert "scheduler 1 is gone (ActorUnavailableError); Ray starts it again" in running.output.getvalue()
    running.task.cancel()


async def test_workers_on_nodes_of_their_own_are_started_again_when_the_scheduler_alone_moves(running: Running) -> None:
    running["scheduler 0"].move("node 6")
    await running.until(lambda: all(len(running[f"worker 0.{rank}"].runs) == 2 for rank in (0, 1)))
    last = running["worker 0.0"].runs[-1]
    assert last["step_addresses"][0] == "tcp://10.0.0.6:7007"
    assert last["worker_host"] == "10.0.0.1", "rank 0 has not moved"
    running.task.cancel()


async def test_what_ends_for_good_ends_all_with_its_last_words(running: Running) -> None:
    running["worker 0.1"].end("worker 0.1 ended with exit code 2. Its last words: no such model")
    with pytest.raises(ProcessFailed, match="no such model"):
        await asyncio.wait_for(running.task, 10)
    assert all(actor.is_killed for actor in running.actors.by_name.values())


async def test_a_replica_that_fails_for_good_is_stopped_alone_and_tried_again() -> None:
    """Before, one broken node ended all replicas, and the router."""
    running = await _running(max_quarantine=0.05)
    running.fleet.note_serving()
    for count in (1, 2):
        running["worker 1.0"].end(CAUSE)
        # The others of its replica were told to end, and all are started again.
        await running.until(lambda count=count: all(len(running[name].runs) == 1 + count for name in NAMES[1]))
        output = running.output.getvalue()
        assert output.count("the GPU fell off the bus") == count
        assert output.count("replica 1 is in quarantine: its processes are stopped, and tried again in") == count
        assert output.count("after a quarantine, with all of replica 1") == count
    assert all(len(running[name].runs) == 1 for name in (*NAMES[0], "router"))
    await running.until(lambda: '"count": 2' in running["router"].files.get("quarantine.json", ""))
    assert json.loads(running["router"].files["quarantine.json"]).keys() == {"1"}
    running.task.cancel()


async def test_nothing_of_a_stopped_replica_runs() -> None:
    running = await _running(max_quarantine=960.0)
    running.fleet.note_serving()
    running["worker 1.0"].end(CAUSE)
    await running.until(lambda: all(running[name].has_ended for name in NAMES[1]))
    # A scheduler that had moved would have taken its workers along.
    await running.fleet._note_place(1, ("10.0.0.9", 7009))
    for _ in range(100):
        await asyncio.sleep(0)
    assert all(len(running[name].runs) == 1 for name in NAMES[1])
    assert not any(running[name].has_ended for name in NAMES[0])
    running.task.cancel()


async def test_without_a_replica_for_too_long_all_end_with_the_last_cause() -> None:
    running = await _running(no_replica_timeout=0.0)
    for replica in (0, 1):
        unit = running.fleet._unit(f"scheduler {replica}")
        running.fleet._quarantine.note_health(unit, True, 0.0)
    running["scheduler 0"].end("scheduler 0 ended with exit code 2")
    await running.until(lambda: running["worker 0.0"].has_ended)
    assert not running.task.done()
    running["worker 1.0"].end(CAUSE)
    with pytest.raises(ProcessFailed, match=r"(?s)fell off the bus.*No replica has been left for"):
        await asyncio.wait_for(running.task, 10)
    assert all(actor.is_killed for actor in running.actors.by_name.values())


async def test_a_router_that_fails_for_good_ends_all(running: Running) -> None:
    running.fleet.note_serving()
    running["router"].end("router ended with exit code 2. Its last words: no such file")
    with pytest.raises(ProcessFailed, match="no such file"):
        await asyncio.wait_for(running.task, 10)


async def test_told_to_end_it_ends_without_an_error(running: Running) -> None:
    await running.fleet.stop(defaultdict(float))
    await asyncio.wait_for(running.task, 10)
    assert all(actor.is_killed for actor in running.actors.by_name.values())


async def test_it_says_what_ray_has_no_room_for_and_can_be_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_PATIENCE_S", 0.01)
    running = Running(has_room=False)
    await running.until(lambda: "Ray has no room yet for [{'CPU': 5" in running.output.getvalue())
    await running.fleet.stop({})
    await asyncio.wait_for(running.task, 10)
    assert running.actors.by_name == {}


def test_a_replica_is_one_bundle_where_a_node_has_room_for_it() -> None:
    needs = needs_of(OPTIONS.model_copy(update={"device": "auto"}), has_gpus=True)
    assert needs.replica == {"CPU": 5, "GPU": 2}
    together = plan_placement(needs, 2, [{"CPU": 64.0}, {"CPU": 8.0, "GPU": 2.0}])
    assert together.groups == (GroupPlan(strategy="SPREAD", bundles=(needs.replica, needs.replica)),)
    assert together.scheduler_at(1) == together.worker_at(1, 0) == (0, 1)
    apart = plan_placement(needs, 2, [{"CPU": 64.0, "GPU": 1.0}] * 8)
    worker: Resources = {"CPU": 2, "GPU": 1}
    scheduler: Resources = {"CPU": 1}
    assert apart.groups == (GroupPlan(strategy="PACK", bundles=(scheduler, worker, worker)),) * 2
    assert (apart.scheduler_at(1), apart.worker_at(1, 1)) == ((1, 0), (1, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_expert_parallel": True}, "enable_expert_parallel on Ray takes data_parallel_size=1"),
        ({"scheduler_addresses": ("a:1", "b:1")}, "scheduler_addresses is made by"),
    ],
)
def test_what_ray_decides_cannot_be_given(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        check(OPTIONS.model_copy(update=changes))
