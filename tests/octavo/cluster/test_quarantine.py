"""Which parts of a cluster are stopped for a while, for how long, and when the cluster ends instead."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from configs.options import Options
from octavo.cluster.errors import ProcessFailed
from octavo.cluster.processes import Stage, Unit, cluster_processes, replica_units
from octavo.cluster.quarantine import Quarantine
from runtime.telemetry.quarantine import QuarantineNote, QuarantineNotes, text_of, write_notes

ONE, TWO = Unit("replica 0", (0,)), Unit("replica 1", (1,))
ROUTER, OTHER_ROUTER = Unit("router 0"), Unit("router 1")
CAUSE = "worker 1.0 was killed by SIGKILL. Its last words:\n  no memory"


def _quarantine(*units: Unit, serves: bool = True, **options: Any) -> Quarantine:
    settings = {"no_replica_timeout": 300.0, "max_quarantine": 960.0, **options}
    made = Quarantine(units or (ONE, TWO, ROUTER, OTHER_ROUTER), **settings)
    if serves:
        for unit in units or (ONE, TWO, ROUTER, OTHER_ROUTER):
            made.note_health(unit, True, 0.0)
    return made


def test_each_quarantine_in_a_row_lasts_twice_as_long_up_to_the_bound() -> None:
    quarantine = _quarantine(max_quarantine=200.0)
    now, found = 0.0, []
    for _ in range(4):
        found.append(quarantine.put(TWO, CAUSE, now))
        assert quarantine.is_in(TWO)
        assert not quarantine.is_in(ONE)
        now += found[-1]
        quarantine.release(TWO, now)
        assert not quarantine.is_in(TWO)
        # It dies as often again within a minute.
        now += 30.0
    assert found == [60.0, 120.0, 200.0, 200.0]
    # It runs for longer than it was stopped.
    assert quarantine.put(TWO, CAUSE, now + 201.0) == 60.0


def test_before_anything_has_served_a_failure_is_a_mistake_in_the_options() -> None:
    quarantine = _quarantine(serves=False)
    for unit in (ONE, ROUTER):
        with pytest.raises(ProcessFailed, match="no memory"):
            quarantine.put(unit, CAUSE, 0.0)
    # Another replica serves.
    quarantine.note_health(ONE, True, 1.0)
    assert quarantine.put(TWO, CAUSE, 2.0) == 60.0


def test_a_router_that_serves_is_no_proof_for_the_only_replica() -> None:
    """It may have been asked in a moment in which a process that can't start seemed to be there."""
    quarantine = _quarantine(ONE, ROUTER, serves=False)
    quarantine.note_serving()
    with pytest.raises(ProcessFailed, match="no memory"):
        quarantine.put(ONE, CAUSE, 0.0)


def test_without_health_a_unit_counts_as_well_once_it_has_run_for_a_minute() -> None:
    quarantine = _quarantine(ONE, serves=False)
    began = time.monotonic()
    quarantine.note_health(ONE, None, began + 59.0)
    quarantine.note_death(ONE, began + 30.0)
    quarantine.note_health(ONE, None, began + 89.0)
    with pytest.raises(ProcessFailed):
        quarantine.put(ONE, CAUSE, began + 89.0)
    quarantine.note_health(ONE, None, began + 91.0)
    assert quarantine.put(ONE, CAUSE, began + 92.0) == 60.0


def test_the_cluster_ends_once_no_replica_has_been_left_for_too_long() -> None:
    quarantine = _quarantine()
    quarantine.put(ONE, "scheduler 0 ended with exit code 2.", 0.0)
    assert quarantine.none_since is None
    quarantine.put(TWO, CAUSE, 10.0)
    assert quarantine.none_since == 10.0
    # One that is tried again is not left until it serves.
    quarantine.release(ONE, 60.0)
    quarantine.note_health(ONE, False, 61.0)
    quarantine.check(299.0)
    with pytest.raises(ProcessFailed, match=r"(?s)no memory.*No replica has been left for 300 s \(no_replica_timeout"):
        quarantine.check(300.0)
    quarantine.note_health(ONE, True, 62.0)
    assert quarantine.none_since is None
    quarantine.check(1e9)


def test_a_timeout_of_zero_ends_the_cluster_with_its_last_replica() -> None:
    quarantine = _quarantine(no_replica_timeout=0.0)
    quarantine.put(ONE, CAUSE, 0.0)
    with pytest.raises(ProcessFailed, match="No replica has been left for 0 s"):
        quarantine.put(TWO, CAUSE, 1.0)


def test_the_last_router_ends_the_cluster_and_one_of_several_does_not() -> None:
    quarantine = _quarantine()
    assert quarantine.put(ROUTER, CAUSE, 0.0) == 60.0
    assert quarantine.none_since is None, "replicas are left"
    with pytest.raises(ProcessFailed, match="No other router is left"):
        quarantine.put(OTHER_ROUTER, CAUSE, 1.0)


def test_routers_are_told_of_replicas_alone(tmp_path: Path) -> None:
    told: list[Mapping[int, QuarantineNote]] = []
    quarantine = _quarantine(on_change=told.append)
    quarantine.put(ROUTER, CAUSE, 0.0)
    quarantine.put(TWO, CAUSE, 0.0)
    quarantine.release(TWO, 60.0)
    assert [list(notes) for notes in told] == [[], [1], [1]]
    assert (told[1][1].count, told[1][1].cause) == (1, "worker 1.0 was killed by SIGKILL.")
    notes = QuarantineNotes(tmp_path)
    assert notes.of(1) is None
    for stopped, left in ((told[1], True), (told[2], False)):
        write_notes(tmp_path, text_of(stopped))
        note = notes.of(1)
        assert note is not None
        assert note.count == 1
        assert (note.seconds_left is not None) is left
    # An `octavo up` that was killed says nothing any more.
    assert QuarantineNote(count=1, until=time.time() - 61, cause="").seconds_left is None
    for text in ("", "[]", '{"1": 3}', '{"x": {}}'):
        write_notes(tmp_path, text)
        assert QuarantineNotes(tmp_path).of(1) is None, "nobody's file ends a router"


def test_processes_of_a_replica_are_one_unit_and_so_are_replicas_in_lockstep() -> None:
    specs = cluster_processes(Options(data_parallel_size=2, num_routers=2), Path("options.yaml"), num_cores=2)
    assert {spec.unit for spec in specs} == {ONE, TWO, ROUTER, OTHER_ROUTER}
    assert {spec.name for spec in specs if spec.unit == TWO} == {"worker 1.0", "scheduler 1"}
    assert all((spec.stage is Stage.ROUTER) == (not spec.unit.replicas) for spec in specs if spec.unit)
    together = Options(data_parallel_size=2, enable_expert_parallel=True)
    assert set(replica_units(together)) == {Unit("replicas 0 to 1", (0, 1))}
