"""Admits requests or rejects them, queues the sequences that wait, and tracks deadlines."""

import heapq

from scheduler.core.messages import ANY_PRIORITY, CoreSettings, GroupRequest, Rejection, RejectReason
from scheduler.core.state.request import Order, Sequence


class Displaceable:
    """Groups that have not begun, here or on another replica: no client holds a token of them."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}  # (-priority, -arrival), by group
        # Entries of discarded groups are dropped when they reach the top, or once they are the majority.
        self._heap: list[tuple[tuple[int, int], int]] = []

    def add(self, request: GroupRequest, arrival: int) -> None:
        """Adds a group, unless it has begun elsewhere (it has output tokens)."""
        if any(start.output_token_ids for start in request.choices):
            return
        self._places[request.group] = -request.priority, -arrival
        heapq.heappush(self._heap, (self._places[request.group], request.group))

    def discard(self, group: int) -> None:
        """Removes a group that no longer waits, if it is here."""
        if self._places.pop(group, None) is not None and len(self._heap) > 2 * len(self._places) + 64:
            self._heap = [(place, group) for group, place in self._places.items()]
            heapq.heapify(self._heap)

    @property
    def lowest_priority(self) -> int | None:
        """The lowest priority here, which is the largest priority number; None if there are no groups."""
        while self._heap and self._heap[0][1] not in self._places:
            heapq.heappop(self._heap)
        return -self._heap[0][0][0] if self._heap else None

    def pop_last(self, priority: int) -> int | None:
        """Pops the last group in order, if its priority is lower than `priority`. The caller then removes the group
        from the queue or puts it back."""
        lowest = self.lowest_priority
        return None if lowest is None or lowest <= priority else heapq.heappop(self._heap)[1]

    def put_back(self, group: int) -> None:
        heapq.heappush(self._heap, (self._places[group], group))


class Admission:
    """Refuses requests that can never run, and bounds the groups that wait for their first run."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self._queued: dict[int, int] = {}  # prompt tokens, by group
        self.num_queued_tokens = 0
        # Used only by the policy `priority`.
        self._displaceable = Displaceable()

    def is_queued(self, group: int) -> bool:
        """True if the group waits for its first run."""
        return group in self._queued

    @property
    def refused_priority(self) -> int | None:
        """The queue is full for requests with this priority number or a larger one. None: it is not full."""
        settings = self.settings
        if len(self._queued) < settings.max_queued_requests and self.num_queued_tokens < settings.max_queued_tokens:
            return None
        lowest = self._displaceable.lowest_priority
        return ANY_PRIORITY if lowest is None else lowest

    def enqueue(self, request: GroupRequest, arrival: int) -> None:
        self._queued[request.group] = len(request.prompt_token_ids)
        self.num_queued_tokens += len(request.prompt_token_ids)
        if self.settings.scheduling_policy == "priority":
            self._displaceable.add(request, arrival)

    def dequeue(self, group: int) -> bool:
        """Removes a group that runs or has ended. False if it was not queued."""
        num_prompt_tokens = self._queued.pop(group, None)
        if num_prompt_tokens is None:
            return False
        self.num_queued_tokens -= num_prompt_tokens
        self._displaceable.discard(group)
        return True

    def refuse(self, request: GroupRequest) -> Rejection | None:
        """The reason to reject a request; None if it may be queued."""
        if message := self._why_invalid(request):
            return Rejection(reason=RejectReason.INVALID, message=message)
        if message := self._why_full(request):
            return Rejection(reason=RejectReason.QUEUE_FULL, message=message)
        return None

    def make_way(self, request: GroupRequest) -> list[int]:
        """The groups that must leave the queue to make room for a request of higher priority, last in order first.
        Empty if even all of them would not make enough room."""
        settings, num_prompt_tokens = self.settings, len(request.prompt_token_ids)
        if num_prompt_tokens > settings.max_queued_tokens:
            return []
        num_requests = len(self._queued) + 1 - settings.max_queued_requests
        num_tokens = self.num_queued_tokens + num_prompt_tokens - settings.max_queued_tokens
        going: list[int] = []
        while len(going) < num_requests or num_tokens > 0:
            group = self._displaceable.pop_last(request.priority)
            if group is None:
                for each in going:
                    self._displaceable.put_back(each)
                return []
            going.append(group)
            num_tokens -= self._queued[group]
        return going

    def _why_invalid(self, request: GroupRequest) -> str | None:
        settings, stop = self.settings, request.stop
        num_prompt_tokens, choices = len(request.prompt_token_ids), [start.choice for start in request.choices]
        if not choices or len(set(choices)) < len(choices):
            return f"choices={choices}: give at least one, each once"
        if not num_prompt_tokens:
            return "the prompt is empty: give at least one token"
        if stop.max_tokens < 1:
            return f"max_tokens={stop.max_tokens}: give at least 1"
        if not 0 <= stop.min_tokens <= stop.max_tokens:
            return f"min_tokens={stop.min_tokens}: give 0 to max_tokens, which is {stop.max_tokens}"
        if num_prompt_tokens >= settings.max_model_len:
            return (
                f"the prompt has {num_prompt_tokens} tokens, but max_model_len={settings.max_model_len} holds prompt "
                f"and output together: give at most {settings.max_model_len - 1}"
            )
        if num_prompt_tokens + stop.max_tokens > settings.max_model_len:
            return (
                f"max_tokens={stop.max_tokens} with a prompt of {num_prompt_tokens} tokens goes beyond "
                f"max_model_len={settings.max_model_len}: give at most {settings.max_model_len - num_prompt_tokens}"
            )
        if not settings.enable_chunked_prefill and num_prompt_tokens > settings.max_num_batched_tokens:
            return (
                f"the prompt has {num_prompt_tokens} tokens, more than max_num_batched_tokens="
                f"{settings.max_num_batched_tokens}, and enable_chunked_prefill is off: give a shorter one, or have "
                "chunked prefill turned on"
            )
        # The last output token is sampled but never computed: it needs no KV.
        most = settings.num_blocks * settings.block_size + 1
        if num_prompt_tokens + stop.max_tokens > most:
            return (
                f"max_tokens={stop.max_tokens} with a prompt of {num_prompt_tokens} tokens never fits into the KV "
                f"cache of {settings.num_blocks} blocks of {settings.block_size} tokens: let prompt and max_tokens "
                f"together be at most {most}, or raise kv_cache_memory"
            )
        return None

    def _why_full(self, request: GroupRequest) -> str | None:
        settings, num_prompt_tokens = self.settings, len(request.prompt_token_ids)
        if num_prompt_tokens > settings.max_queued_tokens:
            return (
                f"the prompt has {num_prompt_tokens} tokens, more than max_queued_tokens={settings.max_queued_tokens}: "
                "give a shorter one, or raise max_queued_tokens"
            )
        if len(self._queued) >= settings.max_queued_requests:
            return (
                f"{len(self._queued)} requests wait already and max_queued_requests={settings.max_queued_requests}: "
                "try again later or elsewhere"
            )
        if self.num_queued_tokens + num_prompt_tokens > settings.max_queued_tokens:
            return (
                f"{self.num_queued_tokens} prompt tokens wait already, this prompt has {num_prompt_tokens} and "
                f"max_queued_tokens={settings.max_queued_tokens}: try again later or elsewhere"
            )
        return None


class Deadlines:
    def __init__(self) -> None:
        self._deadlines: dict[int, float] = {}  # by group
        # Entries of groups that have ended are dropped when they reach the top, or once they are the majority.
        self._heap: list[tuple[float, int]] = []

    def add(self, group: int, deadline: float) -> None:
        self._deadlines[group] = deadline
        heapq.heappush(self._heap, (deadline, group))

    def remove(self, group: int) -> None:
        """Forgets a group that has ended, with or without a deadline."""
        if self._deadlines.pop(group, None) is not None and len(self._heap) > 2 * len(self._deadlines) + 64:
            self._heap = [(deadline, group) for group, deadline in self._deadlines.items()]
            heapq.heapify(self._heap)

    def take_due(self, now: float) -> list[int]:
        """Removes and returns the groups whose deadline is not after `now`, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            _, group = heapq.heappop(self._heap)
            if self._deadlines.pop(group, None) is not None:
                due.append(group)
        return due


class WaitingQueue:
    """Waiting sequences, sorted by `Sequence.order`: a preempted one returns to its old place."""

    def __init__(self) -> None:
        self._heap: list[tuple[Order, Sequence]] = []
        # Removed from the middle; their entries are dropped when they reach the top, or once they are the majority.
        self._removed: set[Order] = set()

    def __len__(self) -> int:
        return len(self._heap) - len(self._removed)

    def push(self, sequence: Sequence) -> None:
        if sequence.order in self._removed:
            self._removed.remove(sequence.order)  # its entry is still there
        else:
            heapq.heappush(self._heap, (sequence.order, sequence))

    def peek(self) -> Sequence | None:
        """The first sequence; None if nothing waits."""
        while self._heap and self._heap[0][0] in self._removed:
            self._removed.remove(heapq.heappop(self._heap)[0])
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Removes and returns the first sequence. Call `peek` just before."""
        return heapq.heappop(self._heap)[1]

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from any place in the queue."""
        self._removed.add(sequence.order)
        if 2 * len(self._removed) > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[0] not in self._removed]
            self._removed.clear()
            heapq.heapify(self._heap)
