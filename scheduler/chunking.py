"""How many tokens of each prefill one step computes."""

from scheduler.messages import CoreSettings


class Chunking:
    """Of one step: shares what decodes leave of the budget among prefills, in the order in which they are asked about.

    At most max_num_partial_prefills of them are left unfinished, and of these max_long_partial_prefills long ones. Each
    gets an equal part of what is left; what a short one does not need goes to those behind it.
    """

    def __init__(self, settings: CoreSettings, budget: int, num_candidates: int) -> None:
        self._settings = settings
        self.budget = budget
        self._num_partial = self._num_long = 0
        self._most_partial = max(1, min(settings.max_num_partial_prefills, num_candidates))

    def is_long(self, num_tokens: int) -> bool:
        threshold = self._settings.long_prefill_token_threshold
        return bool(threshold) and num_tokens > threshold

    def bound(self, num_missing: int, num_tokens: int) -> int:
        """Tokens to compute of a prefill of num_tokens that lacks num_missing; 0: none in this step."""
        settings = self._settings
        if not settings.enable_chunked_prefill:
            whole = min(num_missing, settings.max_num_batched_tokens)
            return whole if whole <= self.budget else 0
        count = min(num_missing, self.budget)
        if self._num_partial < self._most_partial:
            count = min(count, -(-self.budget // (self._most_partial - self._num_partial)))
        if self.is_long(num_tokens):
            count = min(count, settings.long_prefill_token_threshold)
        return count if count == num_missing or self._may_leave_unfinished(num_tokens) else 0

    def passes(self, num_tokens: int) -> bool:
        """Whether those behind may go first, for it is only being long that keeps this one out."""
        settings = self._settings
        return (
            settings.max_long_partial_prefills < settings.max_num_partial_prefills
            and self.is_long(num_tokens)
            and self._num_long >= settings.max_long_partial_prefills
        )

    def spend(self, count: int, num_missing: int, num_tokens: int) -> None:
        """`count` tokens of it are in the step."""
        self.budget -= count
        if count < num_missing:
            self._num_partial += 1
            self._num_long += self.is_long(num_tokens)

    def _may_leave_unfinished(self, num_tokens: int) -> bool:
        settings = self._settings
        if self._num_partial >= settings.max_num_partial_prefills:
            return False
        return not self.is_long(num_tokens) or self._num_long < settings.max_long_partial_prefills
