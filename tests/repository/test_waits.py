"""Every wait has a bound, or a reason in waits.txt to have none.

A wait is found by its name: a call that blocks (`wait`, `join`, `recv`...), an await of something that is not a call of
our own, or an `async for`. A bound is a timeout among the arguments, or one around it (`asyncio.timeout`, `wait_for`).
An await of a function of ours is no wait by itself: what that function waits for is found where it stands.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.repository import ROOT, files, is_generated, name, packages

# Blocking calls, and how many positional arguments they may have without a bound: `thread.join()` waits, and
# `", ".join(words)` does not.
BLOCKING = {
    "accept": 0,
    "acquire": 0,
    "communicate": 1,
    "create_connection": 1,
    "flock": 2,
    "get": 0,
    "HTTPConnection": 2,
    "join": 0,
    "poll": 0,
    "recv": 1,
    "recv_bytes": 0,
    "recv_into": 1,
    "recv_json": 0,
    "recv_multipart": 0,
    "recv_string": 0,
    "result": 0,
    "select": 0,
    "send_multipart": 1,
    "synchronize": 0,
    "urlopen": 1,
    "wait": 0,
    "wait_for": 1,
}
# Module functions with their awaitables as the first argument.
MODULE_WAITS = {"asyncio.wait", "concurrent.futures.wait"}
SUBPROCESS = {f"subprocess.{each}" for each in ("call", "check_call", "check_output", "run")}
# Awaited calls that wait for a peer, a thread or another task, and are not ours.
AWAITED = {
    "aclose",
    "anext",
    "close",
    "code",
    "details",
    "drain",
    "initial_metadata",
    "read",
    "readexactly",
    "readline",
    "readuntil",
    "ready",
    "receive",
    "remote",
    "send",
    "shield",
    "to_thread",
    "trailing_metadata",
    "wait_closed",
    "wait_for_connection",
    "wrap_future",
    "write",
}
NOT_BLOCKING = {"DONTWAIT", "LOCK_NB", "LOCK_UN", "MSG_DONTWAIT", "NOBLOCK"}
# Context managers that end the waits within them: the first three after the time that they are given.
LIMITS = {"Silence", "timeout", "timeout_at"}
OWN_LIMITS = {"bounded_reading", "bounded_write"}

EXCEPTIONS_FILE = Path(__file__).with_name("waits.txt")


def text_of(node: ast.expr) -> str:
    return ast.unparse(node)


def may_be_none(node: ast.expr) -> bool:
    if isinstance(node, ast.IfExp):
        return may_be_none(node.body) or may_be_none(node.orelse)
    return isinstance(node, ast.Constant) and node.value is None


def has_bound(call: ast.Call, num_positional: int) -> bool:
    """num_positional: arguments that are no bounds."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if "timeout" in named:
        return not may_be_none(named["timeout"])
    if (blocking := named.get("blocking")) is not None or call.args:
        first = blocking or call.args[0]
        if isinstance(first, ast.Constant) and first.value is False:
            return True
    if any(isinstance(part, ast.Attribute) and part.attr in NOT_BLOCKING for part in ast.walk(call)):
        return True
    return len(call.args) > num_positional and not may_be_none(call.args[num_positional])


def is_limit(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    function = text_of(node.func).rpartition(".")[2]
    return function in OWN_LIMITS or (function in LIMITS and bool(node.args) and not may_be_none(node.args[0]))


class Waits(ast.NodeVisitor):
    """Collects (line, function, what waits) of the waits without a bound."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[int, str, str]] = []
        self._scope: list[str] = []
        self._is_async = [False]
        self._num_limits = 0
        # A ContextVar's `get` waits for nothing.
        self._context_vars = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign | ast.AnnAssign)
            if isinstance(node.value, ast.Call) and text_of(node.value.func).endswith("ContextVar")
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        self.visit(tree)

    def _note(self, node: ast.AST, what: str) -> None:
        if not self._num_limits:
            self.found.append((node.lineno, ".".join(self._scope) or "<module>", what))  # type: ignore[attr-defined]

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        # A function that is defined within a limit runs whenever it is called.
        num_limits, self._num_limits = self._num_limits, 0
        self._scope.append(node.name)
        self._is_async.append(isinstance(node, ast.AsyncFunctionDef))
        self.generic_visit(node)
        self._is_async.pop()
        self._scope.pop()
        self._num_limits = num_limits

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()

    def _visit_with(self, node: ast.With | ast.AsyncWith) -> None:
        num_limits = sum(is_limit(item.context_expr) for item in node.items)
        self._num_limits += num_limits
        self.generic_visit(node)
        self._num_limits -= num_limits

    visit_With = visit_AsyncWith = _visit_with

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self._note(node, f"async for ... in {text_of(node.iter)}")
        self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        awaited = node.value
        if not isinstance(awaited, ast.Call) or self._waits_when_awaited(awaited):
            self._note(node, f"await {text_of(awaited)}")
        self.generic_visit(node)

    @staticmethod
    def _waits_when_awaited(call: ast.Call) -> bool:
        method = text_of(call.func).rpartition(".")[2]
        if method == "gather":
            # What is awaited are tasks; calls among the arguments are judged where they stand.
            return any(
                isinstance(part.value if isinstance(part, ast.Starred) else part, ast.Attribute | ast.Name)
                for part in call.args
            )
        # A method of a gRPC service begins with a capital letter.
        return (method in AWAITED or method[0].isupper()) and not has_bound(call, 99)

    def visit_Call(self, node: ast.Call) -> None:
        function = text_of(node.func)
        if function == "asyncio.wait_for" and has_bound(node, 1):
            self._num_limits += 1
            self.generic_visit(node)
            self._num_limits -= 1
            return
        if self._waits(node, function):
            self._note(node, text_of(node))
        self.generic_visit(node)

    def _waits(self, node: ast.Call, function: str) -> bool:
        if function in MODULE_WAITS:
            return not has_bound(node, 1)
        if function in SUBPROCESS:
            return not has_bound(node, 99)
        owner, dot, method = function.rpartition(".")
        if not dot or method not in BLOCKING or owner in self._context_vars:
            return False
        if method == "result" and self._is_async[-1]:
            # An asyncio future that is not done raises.
            return False
        if method in ("get", "join") and node.args:
            return False
        return not has_bound(node, BLOCKING[method])


def unbounded_waits() -> Iterator[tuple[str, str]]:
    """("path:function", "line: what waits") of each wait without a bound."""
    for package in packages():
        for path in files(".py", under=ROOT / package):
            if not is_generated(path):
                for line, function, what in Waits(ast.parse(path.read_text())).found:
                    yield f"{name(path)}:{function}", f"{line}: {what}"


def exceptions() -> dict[str, str]:
    """path:function -> reason."""
    lines = [line for line in EXCEPTIONS_FILE.read_text().splitlines() if line and not line.startswith("#")]
    split = [line.split(None, 1) for line in lines]
    assert all(len(parts) == 2 for parts in split), "each line: path:function, then the reason"
    assert len({parts[0] for parts in split}) == len(split), "a function is listed twice"
    return {parts[0]: parts[1] for parts in split}


def test_every_wait_has_a_bound_or_a_reason():
    known = exceptions()
    found = [f"{where}: line {what}" for where, what in unbounded_waits() if where not in known]
    assert not found, (
        "waits without a bound; give each a timeout, or a line in tests/repository/waits.txt that says what ends it:\n"
        + "\n".join(found)
    )


def test_every_exception_is_needed():
    stale = sorted(set(exceptions()) - {where for where, _ in unbounded_waits()})
    assert not stale, f"these functions wait for nothing without a bound; take them out of waits.txt: {stale}"


def test_exceptions_are_sorted_and_reasoned():
    found = exceptions()
    assert list(found) == sorted(found)
    assert not [where for where, reason in found.items() if len(reason.split()) < 3]


def test_the_finder_finds():
    source = """
names = ContextVar("names")

async def waits(queue, future, event, call, stub, tasks):
    await future
    await queue.get()
    await event.wait()
    await asyncio.wait(tasks)
    await asyncio.wait(tasks, timeout=None if event else 1.0)
    await asyncio.gather(*tasks)
    await call.read()
    await stub.Cancel(request)
    async for message in call: pass

def blocks(thread, process, socket, poller, lock, condition):
    thread.join()
    process.communicate(b"text")
    socket.recv_multipart()
    poller.poll(None)
    lock.acquire()
    condition.wait_for(bool)
    subprocess.run(["ls"])
    thread.future.result()
    fcntl.flock(lock, fcntl.LOCK_EX)

class Bounded:
    async def waits(self, queue, future, event, tasks, stub):
        async with asyncio.timeout(5):
            await future
        await asyncio.wait_for(event.wait(), 5)
        await asyncio.wait(tasks, timeout=5)
        await stub.Cancel(request, timeout=5)
        await asyncio.sleep(1)
        await self.own(queue)
        tasks.pop().result()

    def blocks(self, thread, process, socket, poller, lock):
        thread.join(5)
        process.communicate(b"text", 5)
        socket.recv_multipart(zmq.NOBLOCK)
        poller.poll(100)
        lock.acquire(blocking=False)
        subprocess.run(["ls"], timeout=5)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return ", ".join(names.get()), {}.get("a")

    async def none_is_no_bound(self, future):
        async with asyncio.timeout(None):
            await future
"""
    found = Waits(ast.parse(source)).found
    assert Counter(function for _, function, _ in found) == {"waits": 9, "blocks": 9, "Bounded.none_is_no_bound": 1}


if __name__ == "__main__":
    for where, what in unbounded_waits():
        print(where, what)
