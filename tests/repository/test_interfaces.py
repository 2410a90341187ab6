"""An interface has two implementations in the product, or a reason beside it: with one, the class says the same, and
its readers need not look for another one.

Implementations are found by structure, as type checkers find them: a class implements a protocol if it has all of its
members, or is derived from it. A class that is derived from another implementation is no second one.
"""

import ast
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support.repository import ROOT, files, is_generated, name, packages


class Member(NamedTuple):
    """How a member may be called: with so few and so many positional arguments, beside self. None: it is data."""

    is_async: bool = False
    calls: tuple[float, float] | None = None

    def stands_for(self, other: "Member") -> bool:
        if self.calls is None or other.calls is None:
            return self.calls is other.calls
        fewest, most = self.calls
        # What returns an awaitable may be async.
        return self.is_async >= other.is_async and fewest <= other.calls[1] and other.calls[0] <= most


@dataclass
class Class:
    """A class as its source defines it. bases: places of those that are ours, and names of others. reason: the comment
    above it."""

    place: str
    bases: list[str]
    reason: str
    members: dict[str, Member] = field(default_factory=dict)
    is_abstract: bool = False

    @property
    def is_protocol(self) -> bool:
        return "typing.Protocol" in self.bases

    @property
    def is_interface(self) -> bool:
        return self.is_protocol or self.is_abstract


def classes_of(sources: Mapping[str, str]) -> dict[str, Class]:
    """Returns the classes of modules by their places ("a.b.Name"). sources: by module."""
    found: dict[str, Class] = {}
    for module, text in sources.items():
        tree, lines = ast.parse(text), text.splitlines()
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).partition("[")[0] for base in node.bases]
                first_line = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                each = Class(
                    f"{module}.{node.name}",
                    [imported.get(each, f"{module}.{each}") for each in names],
                    lines[first_line - 2].strip() if first_line > 1 else "",
                )
                _add_members(each, node)
                found[each.place] = each
    return found


def _add_members(found: Class, node: ast.ClassDef) -> None:
    for statement in node.body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found.members[statement.name] = _method(statement)
                found.is_abstract |= any("abstractmethod" in ast.unparse(each) for each in statement.decorator_list)
                # Attributes that a method sets.
                for target in ast.walk(statement):
                    if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                        found.members.setdefault(target.attr, Member())
            case ast.AnnAssign(target=ast.Name(id=str(attribute))):
                found.members[attribute] = Member()
            case ast.Assign(targets=targets):
                found.members |= {target.id: Member() for target in targets if isinstance(target, ast.Name)}


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Member:
    decorators = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
    if decorators & {"property", "cached_property", "setter"}:
        return Member()
    arguments, bound = node.args, int("staticmethod" not in decorators)
    most = len(arguments.posonlyargs) + len(arguments.args) - bound
    is_generator = any(isinstance(each, ast.Yield) for each in ast.walk(node))
    fewest = most - len(arguments.defaults)
    return Member(
        isinstance(node, ast.AsyncFunctionDef) and not is_generator,
        (fewest, math.inf if arguments.vararg else most),
    )


def implementations(classes: Mapping[str, Class]) -> Iterator[tuple[Class, list[str]]]:
    """Yields each interface with the places of the classes that implement it. A protocol of __call__ alone is not
    among them: functions implement it."""

    def ancestors(each: Class) -> Iterator[Class]:
        for base in each.bases:
            if base in classes:
                yield classes[base]
                yield from ancestors(classes[base])

    members: dict[str, dict[str, Member]] = {}
    for place, each in classes.items():
        members[place] = dict(each.members)
        for ancestor in ancestors(each):
            members[place] = ancestor.members | members[place]
    concrete = [each for each in classes.values() if not each.is_interface]
    for interface in classes.values():
        needed = members[interface.place]
        if not interface.is_interface or needed.keys() == {"__call__"}:
            continue
        found = [
            each
            for each in concrete
            if interface in ancestors(each) or (interface.is_protocol and _has(members[each.place], needed))
        ]
        yield interface, [each.place for each in found if not any(ancestor in found for ancestor in ancestors(each))]


def _has(members: Mapping[str, Member], needed: Mapping[str, Member]) -> bool:
    return needed.keys() <= members.keys() and all(members[each].stands_for(how) for each, how in needed.items())


def alone(sources: Mapping[str, str]) -> list[str]:
    """Returns the interfaces with fewer than two implementations and without a reason, each with its implementation."""
    return [
        f"{interface.place}: {', '.join(found) or 'nothing'} implements it"
        for interface, found in implementations(classes_of(sources))
        if len(found) < 2 and not interface.reason.startswith("#")
    ]


def test_an_interface_has_two_implementations_or_a_reason_in_a_comment_above_it() -> None:
    product = {
        name(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path.read_text()
        for package in packages()
        for path in files(".py", under=ROOT / package)
        if not is_generated(path)
    }
    assert not alone(product)


_PROTOCOL = """
from typing import Protocol
class Thing(Protocol):
    size: int
    @property
    def name(self) -> str: ...
    async def ask(self, what: str) -> str: ...
"""
_ONE = """
class {name}:
    def __init__(self):
        self.size, self.name = 1, "a"
    async def ask(self, what, more=()):
        return what
"""


def test_interfaces_of_one_class_are_found() -> None:
    # Guards this file: structure that is read wrongly would find a second implementation, or none at all.
    one, other = _ONE.format(name="One"), _ONE.format(name="Other")
    assert alone({"a": _PROTOCOL, "b": one}) == ["a.Thing: b.One implements it"]
    assert alone({"a": _PROTOCOL}) == ["a.Thing: nothing implements it"]
    assert not alone({"a": _PROTOCOL, "b": one, "c": other})
    assert not alone({"a": _PROTOCOL.replace("class Thing", "# The other one is torch's.\nclass Thing"), "b": one})
    for almost in (
        other.replace("async def", "def"),
        other.replace("what, more=()", "what, more"),
        other.replace("self.size, ", "self.length, "),
        "from b import One\nclass Other(One):\n    pass",
    ):
        assert alone({"a": _PROTOCOL, "b": one, "c": almost}) == ["a.Thing: b.One implements it"], almost
    abstract = "from abc import ABC, abstractmethod\nclass Thing(ABC):\n    @abstractmethod\n    def ask(self): ...\n"
    derived = "from a import Thing\nclass One(Thing):\n    def ask(self):\n        pass\n"
    assert alone({"a": abstract, "b": derived}) == ["a.Thing: b.One implements it"]
    assert not alone({"a": abstract, "b": derived, "c": derived})
    of_calls = "from typing import Protocol\nclass Thing(Protocol):\n    def __call__(self, size: int) -> str: ...\n"
    assert not alone({"a": of_calls})
