"""A grammar engine that waits where a test wants it to."""

import threading

from protos.inference_pb2 import Constraint
from runtime.grammar.engine import ConstraintCompiler, ConstraintError, EngineError, OverBoundError

HELD = Constraint(regex="held")


class HeldEngine(ConstraintCompiler):
    """Takes any constraint as it is. HELD waits until it may end."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.num_compiled = 0

    def canonical(self, constraint: Constraint) -> Constraint:
        self.num_compiled += 1
        if constraint == HELD:
            self.has_begun.set()
            assert self.may_end.wait(60)
        if constraint.regex == "wrong":
            raise ConstraintError("regex: it is wrong")
        if constraint.regex == "no engine":
            raise EngineError("no tokenizer.json")
        if constraint.regex == "slow":
            raise OverBoundError("it takes too long")
        return constraint
