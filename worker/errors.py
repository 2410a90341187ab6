"""Errors that end an epoch, or the worker process.

WorkerError
├── PlanError       a plan breaks an invariant of the wire: the epoch is over, the next one may be fine
├── StepError       a step can't be computed: the epoch is over, the next one may be fine
│   └── CollectiveError  the step failed because another rank is gone
└── PermanentError  a model or an option that a restart would not fix (loading turns ValueErrors into this one)
"""


class WorkerError(Exception):
    """Base class. The message says what failed and what would work."""


class PlanError(WorkerError):
    """A message from the scheduler that breaks an invariant of protos/step.proto; names the field and the value."""


class StepError(WorkerError):
    """The model raised an error in a step; a request in that step may be the cause."""


class CollectiveError(StepError):
    """A collective call failed because another rank died, hangs, or failed and left; the cause lies with that rank."""


class PermanentError(WorkerError):
    """An error that a restart would hit again."""
