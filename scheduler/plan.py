"""A step's plan while it is being made."""

from scheduler.messages import Plan, PlannedRow
from scheduler.request import Sequence


class PlanDraft:
    """The plan, the token budget left, and whom the step samples for.

    No block is published before every running sequence has its place: until then one can still be withdrawn, and
    nothing of it counts as computed any more.
    """

    __slots__ = ("awaited", "budget", "filled", "has_preempted", "plan")

    def __init__(self, budget: int) -> None:
        self.plan = Plan()
        self.budget = budget
        # Those that get a token from this step, by the number of their stay.
        self.awaited: dict[int, Sequence] = {}
        # Running sequences that may fill a block in this step, in batch order.
        self.filled: list[Sequence] = []
        self.has_preempted = False

    def add_row(self, sequence: Sequence) -> None:
        """Tells the workers of a sequence that has just begun to run."""
        self.plan.new_rows.append(
            PlannedRow(
                row=sequence.row,
                sequence=sequence.number,
                token_ids=sequence.token_ids(),
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=sequence.num_computed_tokens,
                block_ids=list(sequence.block_ids),
                choice=sequence.choice,
                sampling=sequence.group.request.sampling,
            )
        )

    def schedule(self, sequence: Sequence, count: int) -> None:
        """Adds the next `count` tokens of a sequence that has a row and blocks for them."""
        self.plan.scheduled.append((sequence.row, count))
        self.budget -= count
        sequence.num_computed_tokens += count
        if sequence.num_computed_tokens == sequence.num_tokens:
            self.awaited[sequence.number] = sequence

    def withdraw(self, sequence: Sequence) -> None:
        """Takes out a running sequence that is being preempted, if it is in the plan already.

        Only one whose next token was to be sampled can be: longer chunks are added later, in the order of the running.
        Its place in the budget stays empty.
        """
        self.has_preempted = True
        if self.awaited.pop(sequence.number, None) is None:
            return
        plan, row = self.plan, sequence.row
        plan.scheduled = [entry for entry in plan.scheduled if entry[0] != row]
        plan.grown_rows = [entry for entry in plan.grown_rows if entry[0] != row]
