"""Compiles the constraints of requests, and remembers their canonical form.

The grammar engine compiles in a process of its own, within a bound of time; here a thread waits for it. A caller has
one constraint compiled at a time, and callers take turns. Those whose constraints have lately been slow never have all
processes, so that they delay nobody else's.
"""

import asyncio
import contextlib
import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from protos.inference_pb2 import Constraint, ModelInfo
from router.errors import InvalidConstraint, MissingFeature
from router.security.identity import caller_share
from router.telemetry.metrics import RouterMetrics
from router.turns import Turns
from runtime.grammar.compiling.compiler import Compiler
from runtime.grammar.engine import ConstraintCompiler, ConstraintError, EngineError, OverBoundError

# Constraints that are compiled at once, each in a process of its own, which is started when it is needed.
_NUM_COMPILERS = 2
# A caller is slow while it owes more than so many seconds of compiling, of which it pays back so many each second: for
# 15 s after a constraint that took 2 s.
_SLOW_SECONDS, _REPAID_SECONDS = 0.5, 0.1
# Callers that are remembered before those that owe nothing are forgotten.
_MOST_DEBTORS = 256
# For so long a constraint that was over a bound is refused at once.
_OVER_BOUND_SECONDS = 60.0
_MOST_PROBLEM_CHARS = 2_000
# Constraints that are remembered, at most, and the bytes of what is known of them.
_MOST_OUTCOMES, _MOST_OUTCOME_BYTES = 4096, 2**25
# Bytes of an outcome beside its text.
_OUTCOME_BYTES = 512

CompilerMaker = Callable[[ModelInfo], ConstraintCompiler]


@dataclass(frozen=True, slots=True)
class Refusal:
    problem: str
    # The field of the constraint that is wrong; empty: the constraint itself.
    kind: str
    # By time.monotonic(). The machine may have been busy: then it does not hold for good.
    until: float = math.inf


Outcome = Constraint | Refusal


class Outcomes:
    """The outcomes of constraints, by their digests: canonical forms, and why others were refused.

    The one that has not been asked for longest goes first.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, Outcome] = OrderedDict()
        self._num_bytes = 0

    def get(self, digest: bytes) -> Outcome | None:
        found = self._found.get(digest)
        if isinstance(found, Refusal) and time.monotonic() >= found.until:
            self._drop(digest)
            return None
        if found is not None:
            self._found.move_to_end(digest)
        return found

    def put(self, digest: bytes, outcome: Outcome) -> None:
        if digest in self._found:
            return
        self._found[digest] = outcome
        self._num_bytes += _size_of(outcome)
        while len(self._found) > _MOST_OUTCOMES or self._num_bytes > _MOST_OUTCOME_BYTES:
            self._drop(next(iter(self._found)))

    def _drop(self, digest: bytes) -> None:
        self._num_bytes -= _size_of(self._found.pop(digest))


def _size_of(outcome: Outcome) -> int:
    text = outcome.ByteSize() if isinstance(outcome, Constraint) else len(outcome.problem)
    return text + _OUTCOME_BYTES


def canonical_form(compiler: ConstraintCompiler, constraint: Constraint) -> Constraint:
    """Raises InvalidConstraint, and MissingFeature if none can be compiled here."""
    try:
        return compiler.canonical(constraint)
    except ConstraintError as error:
        refusal = _refusal(error, constraint)
        raise InvalidConstraint(refusal.problem, refusal.kind) from None
    except EngineError as error:
        raise _unable(error) from None


def _unable(error: EngineError) -> MissingFeature:
    return MissingFeature(f"sampling.constraint is set, which this router can't compile: {error}")


def _refusal(error: ConstraintError, constraint: Constraint) -> Refusal:
    kind = constraint.WhichOneof("kind") or ""
    until = time.monotonic() + _OVER_BOUND_SECONDS if isinstance(error, OverBoundError) else math.inf
    return Refusal(_without_kind(str(error), kind)[:_MOST_PROBLEM_CHARS], kind, until)


def _without_kind(problem: str, kind: str) -> str:
    """The field names the kind already."""
    rest = problem.removeprefix(kind)
    if not kind or rest == problem:
        return problem
    for separator in (": ", ", line "):
        if rest.startswith(separator):
            return rest[2:]
    return rest[1:] if rest.startswith(" at ") else f"it{rest}"


def compilers(directory: Path, seconds: float) -> CompilerMaker:
    """directory: of the tokenizer. seconds: option constraint_compile_timeout."""
    return lambda model: Compiler(directory, model.vocab_size, model.eos_token_ids, seconds)


class Constraints:
    """The constraints of all requests of a router process."""

    def __init__(self, make_compiler: CompilerMaker, metrics: RouterMetrics) -> None:
        self._make_compiler, self._metrics = make_compiler, metrics
        self._outcomes = Outcomes()
        self._threads = ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="constraints")
        self._turns, self._slow_turns = Turns(_NUM_COMPILERS), Turns(_NUM_COMPILERS - 1)
        self._debts = _Debts()
        # By caller: for one constraint at a time, and the number of those that take or wait for that turn.
        self._own_turns: dict[str, tuple[Turns, int]] = {}
        # Used on the threads, under the lock.
        self._lock = threading.Lock()
        self._idle: list[ConstraintCompiler] = []
        self._is_closed = False

    async def canonical(self, constraint: Constraint, model: ModelInfo) -> Constraint:
        """Returns the canonical form. Raises InvalidConstraint, and MissingFeature if this router can't compile any."""
        digest = _digest(constraint)
        if (found := self._known(digest)) is not None:
            return found
        caller = caller_share()
        with contextlib.ExitStack() as held:
            await self._take_own_turn(caller, held)
            for turns in (self._slow_turns, self._turns) if self._debts.is_slow(caller) else (self._turns,):
                await turns.take(caller)
                held.callback(turns.give_back)
            # Another request may have brought it meanwhile.
            if (found := self._known(digest)) is not None:
                return found
            copied = Constraint()
            copied.CopyFrom(constraint)
            work = self._threads.submit(self._compile, copied, model)
            # What is being compiled can't be stopped: it holds its turns even if its caller goes away.
            loop, until_done = asyncio.get_running_loop(), held.pop_all()
            work.add_done_callback(lambda done: _call_soon(loop, self._done, caller, digest, done, until_done))
        outcome, _ = await asyncio.wrap_future(work)
        return self._taken(outcome)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for compiler in idle:
            compiler.close()

    def _known(self, digest: bytes) -> Constraint | None:
        """Raises InvalidConstraint."""
        found = self._outcomes.get(digest)
        if found is None:
            return None
        self._metrics.constraints.labels("refused" if isinstance(found, Refusal) else "cached").inc()
        return self._taken(found)

    def _taken(self, outcome: Outcome) -> Constraint:
        """Raises InvalidConstraint."""
        if isinstance(outcome, Refusal):
            raise InvalidConstraint(outcome.problem, outcome.kind)
        return outcome

    async def _take_own_turn(self, caller: str, held: contextlib.ExitStack) -> None:
        turns, num_users = self._own_turns.get(caller, (Turns(1), 0))
        self._own_turns[caller] = turns, num_users + 1
        held.callback(self._leave, caller)
        await turns.take(caller)
        held.callback(turns.give_back)

    def _leave(self, caller: str) -> None:
        turns, num_users = self._own_turns.pop(caller)
        if num_users > 1:
            self._own_turns[caller] = turns, num_users - 1

    def _compile(self, constraint: Constraint, model: ModelInfo) -> tuple[Outcome, float]:
        """Runs on a thread. Returns what becomes of the constraint, and the seconds that it took."""
        with self._lock:
            compiler = self._idle.pop() if self._idle else self._make_compiler(model)
        since = time.monotonic()
        try:
            outcome: Outcome = compiler.canonical(constraint)
        except ConstraintError as error:
            outcome = _refusal(error, constraint)
        except EngineError as error:
            raise _unable(error) from None
        finally:
            seconds = time.monotonic() - since
            self._metrics.constraint_seconds.observe(seconds)
            with self._lock:
                is_used = not self._is_closed
                if is_used:
                    self._idle.append(compiler)
            if not is_used:
                compiler.close()
        return outcome, seconds

    def _done(
        self, caller: str, digest: bytes, work: "Future[tuple[Outcome, float]]", until_done: contextlib.ExitStack
    ) -> None:
        if not work.cancelled() and work.exception() is not None:
            self._metrics.constraints.labels("refused").inc()
        elif not work.cancelled():
            outcome, seconds = work.result()
            self._debts.add(caller, seconds)
            self._outcomes.put(digest, outcome)
            if isinstance(outcome, Constraint):
                # A resume brings this form.
                self._outcomes.put(_digest(outcome), outcome)
            self._metrics.constraints.labels("refused" if isinstance(outcome, Refusal) else "compiled").inc()
        until_done.close()


class _Debts:
    """The seconds of compiling that callers owe."""

    def __init__(self) -> None:
        # With the time at which it was so much.
        self._owed: dict[str, tuple[float, float]] = {}

    def is_slow(self, caller: str) -> bool:
        return self._of(caller) > _SLOW_SECONDS

    def add(self, caller: str, seconds: float) -> None:
        self._owed[caller] = self._of(caller) + seconds, time.monotonic()
        if len(self._owed) > _MOST_DEBTORS:
            self._owed = {each: owed for each, owed in self._owed.items() if self._of(each) > 0}

    def _of(self, caller: str) -> float:
        seconds, since = self._owed.get(caller, (0.0, 0.0))
        return max(seconds - (time.monotonic() - since) * _REPAID_SECONDS, 0.0)


def _digest(constraint: Constraint) -> bytes:
    return hashlib.sha256(constraint.SerializeToString(deterministic=True)).digest()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    # The loop may be closed by the time that the last calls of a router end.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
