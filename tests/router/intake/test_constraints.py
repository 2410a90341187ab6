"""Constraints of several callers: who is compiled when, and what is remembered."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from protos.inference_pb2 import Constraint
from router.errors import InvalidConstraint, MissingFeature
from router.intake import constraints
from router.intake.constraints import Constraints
from router.security.identity import Identity, set_caller
from router.telemetry.metrics import RouterMetrics
from tests.fakes.scheduler import model_info
from tests.support.held_engine import HELD, HeldEngine

MODEL = model_info()


@pytest.fixture
def engine() -> HeldEngine:
    return HeldEngine()


@pytest.fixture
async def compiled(engine: HeldEngine) -> AsyncIterator[Constraints]:
    found = Constraints(lambda model: engine, RouterMetrics())
    yield found
    engine.may_end.set()
    found.close()


def _choice(*texts: str) -> Constraint:
    made = Constraint()
    made.choice.texts.extend(texts)
    return made


def _start(compiled: Constraints, tenant: str, constraint: Constraint) -> asyncio.Task[Constraint]:
    async def ask() -> Constraint:
        set_caller(Identity(tenant=tenant))
        return await compiled.canonical(constraint, MODEL)

    return asyncio.create_task(ask())


async def _held(engine: HeldEngine) -> None:
    assert await asyncio.to_thread(engine.has_begun.wait, 20)


async def test_a_callers_slow_constraint_delays_only_its_own(compiled: Constraints, engine: HeldEngine) -> None:
    slow = _start(compiled, "a", HELD)
    await _held(engine)
    own = [_start(compiled, "a", _choice(f"a{i}")) for i in range(3)]
    for i in range(3):
        assert await _start(compiled, "b", _choice(f"b{i}")) == _choice(f"b{i}")
    assert not slow.done()
    assert not any(each.done() for each in own)
    engine.may_end.set()
    assert await slow == HELD
    assert await asyncio.gather(*own) == [_choice(f"a{i}") for i in range(3)]
    # Nothing is kept of callers that wait for nothing.
    await asyncio.sleep(0)
    assert not compiled._own_turns


async def test_many_that_ask_for_the_same_at_once_wait_for_one(compiled: Constraints, engine: HeldEngine) -> None:
    tasks = [_start(compiled, "a", HELD) for _ in range(8)]
    await _held(engine)
    engine.may_end.set()
    assert await asyncio.gather(*tasks) == [HELD] * 8
    assert engine.num_compiled == 1


async def test_callers_that_leave_hold_up_nobody(compiled: Constraints, engine: HeldEngine) -> None:
    """One leaves while its constraint is compiled, and one while it waits."""
    slow = _start(compiled, "a", HELD)
    await _held(engine)
    waiting, last = _start(compiled, "a", _choice("x")), _start(compiled, "a", _choice("y"))
    await asyncio.sleep(0)
    for each in (slow, waiting):
        each.cancel()
    assert not last.done()
    engine.may_end.set()
    assert await last == _choice("y")
    # What was compiled for nobody is remembered, too.
    assert await compiled.canonical(HELD, MODEL) == HELD
    assert engine.num_compiled == 2


async def test_refusals_are_remembered(compiled: Constraints, engine: HeldEngine) -> None:
    for _ in range(3):
        with pytest.raises(InvalidConstraint, match=r"^sampling\.constraint\.regex: it is wrong$"):
            await compiled.canonical(Constraint(regex="wrong"), MODEL)
    assert engine.num_compiled == 1


async def test_one_over_a_bound_is_tried_again_after_a_while(
    compiled: Constraints, engine: HeldEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidConstraint, match=r"^sampling\.constraint\.regex: it takes too long$"):
            await compiled.canonical(Constraint(regex="slow"), MODEL)
    assert engine.num_compiled == 1
    now = time.monotonic()
    monkeypatch.setattr(constraints.time, "monotonic", lambda: now + constraints._OVER_BOUND_SECONDS + 1)
    with pytest.raises(InvalidConstraint):
        await compiled.canonical(Constraint(regex="slow"), MODEL)
    assert engine.num_compiled == 2


async def test_slow_callers_never_have_all_processes(
    compiled: Constraints, engine: HeldEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "_SLOW_SECONDS", 0.0)
    monkeypatch.setattr(constraints, "_REPAID_SECONDS", 0.0)
    for caller in ("a", "b"):
        await _start(compiled, caller, _choice(caller))
    first = _start(compiled, "a", HELD)
    await _held(engine)
    second = _start(compiled, "b", _choice("held up"))
    for caller in ("c", "d"):
        assert await _start(compiled, caller, _choice(caller)) == _choice(caller)
    assert not first.done()
    assert not second.done()
    engine.may_end.set()
    assert (await first, await second) == (HELD, _choice("held up"))


async def test_debts_are_paid_back(monkeypatch: pytest.MonkeyPatch) -> None:
    debts, now = constraints._Debts(), 100.0
    monkeypatch.setattr(constraints.time, "monotonic", lambda: now)
    debts.add("a", 2.0)
    assert (debts.is_slow("a"), debts.is_slow("b")) == (True, False)
    now += 14.0
    assert debts.is_slow("a")
    now += 2.0
    assert not debts.is_slow("a")
    now += 100.0
    for i in range(constraints._MOST_DEBTORS):
        debts.add(f"caller {i}", 1.0)
    assert len(debts._owed) == constraints._MOST_DEBTORS, "who owes nothing is forgotten"


async def test_the_cache_is_bounded(compiled: Constraints, engine: HeldEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "_MOST_OUTCOMES", 3)
    for text in "abcadea":
        await compiled.canonical(_choice(text), MODEL)
    # The second and third a are found, for it was asked for last.
    assert engine.num_compiled == 5
    monkeypatch.setattr(constraints, "_MOST_OUTCOME_BYTES", 2000)
    await compiled.canonical(_choice("x" * 1900), MODEL)
    await compiled.canonical(_choice("x" * 1900), MODEL)
    assert engine.num_compiled == 7
    assert compiled._outcomes._num_bytes == 0


async def test_a_router_that_can_compile_nothing_says_why(compiled: Constraints) -> None:
    with pytest.raises(MissingFeature, match="can't compile: no tokenizer"):
        await compiled.canonical(Constraint(regex="no engine"), MODEL)
