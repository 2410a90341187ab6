"""What a worker can't get over.

WorkerError
├── PlanError       a plan that contradicts the wire's invariants: this epoch is over, the next one may be fine
├── StepError       a step that can't be computed: likewise
│   └── CollectiveError  because of another rank, which is not there any more
└── PermanentError  a model or an option that no restart would mend (ValueErrors of loading become this one)
"""


class WorkerError(Exception):
    """The message says what failed and what would work."""


class PlanError(WorkerError):
    """A message from the scheduler that breaks an invariant of protos/step.proto; names the field and the value."""


class StepError(WorkerError):
    """The model raised something in a step; a request in it may be why."""


class CollectiveError(StepError):
    """A call of a group of ranks failed: another rank has died, hangs, or has failed and left. What became of that one
    is the cause."""


class PermanentError(WorkerError):
    """Starting again would fail in the same way."""
