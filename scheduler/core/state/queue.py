"""Admits requests or rejects them, says whose turn it is, and tracks deadlines.

Tenants are served by weight: next comes the one that has been served least. That is the Virtual Token Counter (Sheng
and others, "Fairness in Serving Large Language Models", OSDI 2024). A tenant's counter grows by the tokens that it has
begun to compute, divided by its weight. A tenant that begins to wait gets at least the counter of those that wait
already, so time in which it asked for nothing earns it nothing.
"""

import heapq
import math

from runtime.shares import SharedRoom
from scheduler.core.messages import ANY_PRIORITY, CoreSettings, GroupRequest, Rejection, RejectReason
from scheduler.core.state.request import Order, Sequence

# An output token costs as much as two prompt tokens, as in that paper.
OUTPUT_TOKEN_COST = 2


class TenantShares:
    """The counter of each tenant."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        # No tenant that begins to wait gets less than this.
        self._floor = 0.0

    def served(self, tenant: str) -> float:
        return self._served.get(tenant, self._floor)

    def charge(self, request: GroupRequest, cost: int) -> None:
        """Counts what is computed for a request's tenant. cost: in prompt tokens."""
        self._served[request.tenant] = self.served(request.tenant) + cost / request.weight

    def raise_floor(self, floor: float) -> None:
        """Sets the least counter of a tenant that begins to wait; it never falls."""
        self._floor = max(self._floor, floor)

    def begin(self, tenant: str, num_waiting: int) -> None:
        """Raises the counter of a tenant that begins to wait. num_waiting: tenants that wait already."""
        self._served[tenant] = max(self.served(tenant), self._floor)
        if len(self._served) > 2 * num_waiting + 64:
            # The others would be raised to the floor anyway.
            self._served = {each: served for each, served in self._served.items() if served > self._floor}
            self._served.setdefault(tenant, self._floor)

    def save(self) -> tuple[dict[str, float], float]:
        """Returns counters and floor, for `restore`."""
        return dict(self._served), self._floor

    def restore(self, served: dict[str, float], floor: float) -> None:
        self._served, self._floor = dict(served), floor


class _Lane:
    """The waiting sequences of one tenant, sorted by `Sequence.order`: a preempted one returns to its old place."""

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

    def first(self) -> Sequence:
        while self._heap[0][0] in self._removed:
            self._removed.remove(heapq.heappop(self._heap)[0])
        return self._heap[0][1]

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from any place."""
        self._removed.add(sequence.order)
        if 2 * len(self._removed) > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[0] not in self._removed]
            self._removed.clear()
            heapq.heapify(self._heap)


class WaitingQueue:
    """Waiting sequences, in order: of all tenants' first ones, that of the tenant served least comes first."""

    def __init__(self, *, priority_first: bool) -> None:
        """priority_first: a lower priority number goes before any share; tenants share among equal ones."""
        self.shares = TenantShares()
        self._priority_first = priority_first
        self._lanes: dict[str, _Lane] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def arrive(self, request: GroupRequest) -> None:
        """Notes that a tenant asks for more. Call it before `push` of a new request's sequences."""
        if request.tenant in self._lanes:
            return
        if self._lanes:
            self.shares.raise_floor(min(map(self.shares.served, self._lanes)))
        self.shares.begin(request.tenant, len(self._lanes))

    def push(self, sequence: Sequence) -> None:
        self._num_waiting += 1
        self._lanes.setdefault(sequence.group.request.tenant, _Lane()).push(sequence)

    def peek(self) -> Sequence | None:
        """The first sequence; None if nothing waits."""
        if not self._lanes:
            return None
        firsts = (lane.first() for lane in self._lanes.values())
        return next(firsts) if len(self._lanes) == 1 else min(firsts, key=self.rank)

    def rank(self, sequence: Sequence) -> tuple[float, float, Order]:
        """The place of a sequence among the first ones of all tenants."""
        first = sequence.order[0] if self._priority_first else 0
        return first, self.shares.served(sequence.group.request.tenant), sequence.order

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from any place in the queue."""
        self._num_waiting -= 1
        tenant = sequence.group.request.tenant
        lane = self._lanes[tenant]
        lane.remove(sequence)
        if not lane:
            del self._lanes[tenant]
            if not self._lanes:
                self.shares.raise_floor(self.shares.served(tenant))

    def check_integrity(self) -> None:
        """Asserts that the lanes hold what is counted."""
        assert all(self._lanes.values()), "a tenant without sequences has a lane"
        assert self._num_waiting == sum(map(len, self._lanes.values()))


class Displaceable:
    """Groups that have not begun, here or on another replica: no client holds a token of them."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[float, int]] = {}  # (-priority, -arrival), by group; aged, as in Sequence.order
        # Entries of discarded groups are dropped when they reach the top, or once they are the majority.
        self._heap: list[tuple[tuple[float, int], int]] = []

    def add(self, request: GroupRequest, priority: float, arrival: int) -> None:
        """Adds a group, unless it has begun elsewhere (it has output tokens)."""
        if any(start.output_token_ids for start in request.choices):
            return
        self._places[request.group] = -priority, -arrival
        heapq.heappush(self._heap, (self._places[request.group], request.group))

    def discard(self, group: int) -> None:
        """Removes a group that no longer waits, if it is here."""
        if self._places.pop(group, None) is not None and len(self._heap) > 2 * len(self._places) + 64:
            self._heap = [(place, group) for group, place in self._places.items()]
            heapq.heapify(self._heap)

    @property
    def lowest_priority(self) -> float | None:
        """The lowest priority here, which is the largest priority number; None if there are no groups."""
        while self._heap and self._heap[0][1] not in self._places:
            heapq.heappop(self._heap)
        return -self._heap[0][0][0] if self._heap else None

    def pop_last(self, priority: float) -> int | None:
        """Pops the last group in order, if its priority is lower than `priority`. The caller then removes the group
        from the queue or puts it back."""
        lowest = self.lowest_priority
        return None if lowest is None or lowest <= priority else heapq.heappop(self._heap)[1]

    def put_back(self, group: int) -> None:
        heapq.heappush(self._heap, (self._places[group], group))


class Admission:
    """Refuses requests that can never run, and bounds the groups that wait for their first run.

    Tenants share the places and tokens of the queue (runtime.shares): one alone gets half of them.
    """

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        # The age of a request that comes now (scheduler.core.policies.age_of).
        self.age = 0
        self._queued: dict[int, GroupRequest] = {}
        self._places = SharedRoom(settings.max_queued_requests)
        self._tokens = SharedRoom(settings.max_queued_tokens)
        # By tenant: its last request's weight, and, under the policy `priority`, what its urgent requests displace.
        self._weights: dict[str, float] = {}
        self._displaceable: dict[str, Displaceable] = {}

    @property
    def num_queued_tokens(self) -> int:
        return self._tokens.total

    def is_queued(self, group: int) -> bool:
        """True if the group waits for its first run."""
        return group in self._queued

    @property
    def refused_priority(self) -> int | None:
        """The queue is full for requests with this priority number or a larger one. None: it is not full."""
        if self._places.total < self._places.size and self._tokens.total < self._tokens.size:
            return None
        return self._refused_priority("")

    @property
    def refused_tenants(self) -> tuple[tuple[str, int], ...]:
        """Tenants that have used up their share, each with the least priority number that is refused."""
        if not self._weights:
            return ()
        return tuple(
            (tenant, self._refused_priority(tenant))
            for tenant, weight in self._weights.items()
            if tenant and not (self._places.fits(tenant, 1, weight) and self._tokens.fits(tenant, 1, weight))
        )

    def _refused_priority(self, tenant: str) -> int:
        found = self._displaceable.get(tenant)
        lowest = None if found is None else found.lowest_priority
        return ANY_PRIORITY if lowest is None else int(lowest) - self.age

    def enqueue(self, request: GroupRequest, priority: float, arrival: int) -> None:
        """priority, arrival: the group's place in the order of the policy."""
        tenant = request.tenant
        self._queued[request.group] = request
        self._take(request)
        self._weights[tenant] = request.weight
        if self.settings.scheduling_policy == "priority":
            self._displaceable.setdefault(tenant, Displaceable()).add(request, priority, arrival)

    def dequeue(self, group: int) -> bool:
        """Removes a group that runs or has ended. False if it was not queued."""
        request = self._queued.pop(group, None)
        if request is None:
            return False
        self._give_back(request)
        if request.tenant in self._displaceable:
            self._displaceable[request.tenant].discard(group)
        if not self._places.of(request.tenant):
            del self._weights[request.tenant]
            self._displaceable.pop(request.tenant, None)
        return True

    def _take(self, request: GroupRequest) -> None:
        self._places.add(request.tenant, 1)
        self._tokens.add(request.tenant, len(request.prompt_token_ids))

    def _give_back(self, request: GroupRequest) -> None:
        self._places.give_back(request.tenant, 1)
        self._tokens.give_back(request.tenant, len(request.prompt_token_ids))

    def refuse(self, request: GroupRequest) -> Rejection | None:
        """The reason to reject a request; None if it may be queued."""
        if message := self._why_invalid(request):
            return Rejection(reason=RejectReason.INVALID, message=message)
        if message := self._why_full(request):
            return Rejection(reason=RejectReason.QUEUE_FULL, message=message)
        return None

    def make_way(self, request: GroupRequest) -> list[int]:
        """The tenant's own groups that must leave the queue to make room for a request of higher priority, last in
        order first. Empty if even all of them would not make enough room."""
        displaceable = self._displaceable.get(request.tenant)
        if displaceable is None or len(request.prompt_token_ids) > self.settings.max_queued_tokens:
            return []
        going: list[int] = []
        while self._why_full(request):
            group = displaceable.pop_last(request.priority + self.age)
            if group is None:
                break
            going.append(group)
            self._give_back(self._queued[group])
        is_enough = not self._why_full(request)
        for each in going:
            # They are dequeued as they end.
            self._take(self._queued[each])
            if not is_enough:
                displaceable.put_back(each)
        return going if is_enough else []

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
        return why_items_never_fit(request, settings) if request.items else None

    def _why_full(self, request: GroupRequest) -> str | None:
        settings, num_prompt_tokens = self.settings, len(request.prompt_token_ids)
        if num_prompt_tokens > settings.max_queued_tokens:
            return (
                f"the prompt has {num_prompt_tokens} tokens, more than max_queued_tokens={settings.max_queued_tokens}: "
                "give a shorter one, or raise max_queued_tokens"
            )
        if self._places.total >= settings.max_queued_requests:
            return (
                f"{self._places.total} requests wait already and max_queued_requests={settings.max_queued_requests}: "
                "try again later or elsewhere"
            )
        if self.num_queued_tokens + num_prompt_tokens > settings.max_queued_tokens:
            return (
                f"{self.num_queued_tokens} prompt tokens wait already, this prompt has {num_prompt_tokens} and "
                f"max_queued_tokens={settings.max_queued_tokens}: try again later or elsewhere"
            )
        tenant, weight = request.tenant, request.weight
        num_waiting = self._places.of(tenant)
        # One request always fits, however long it is.
        if not tenant or not num_waiting:
            return None
        if not (self._places.fits(tenant, 1, weight) and self._tokens.fits(tenant, num_prompt_tokens, weight)):
            return (
                f"{num_waiting} requests with {self._tokens.of(tenant)} prompt tokens of tenant {tenant} wait already, "
                f"and this prompt has {num_prompt_tokens}: a tenant may have as many as are free of "
                f"max_queued_requests={settings.max_queued_requests} and max_queued_tokens="
                f"{settings.max_queued_tokens}, times its weight; try again later or elsewhere"
            )
        return None


def why_items_never_fit(request: GroupRequest, settings: CoreSettings) -> str:
    """The reason why the items of a request can never be encoded; empty if there is none."""
    size, sizes = settings.encoder_cache_size, {span.name: span.num_embeddings for span in request.items}
    if not sizes or (max(sizes.values()) <= size and (settings.enable_chunked_prefill or sum(sizes.values()) <= size)):
        return ""
    if not size:
        return "the prompt has items (images, videos), but the workers take none: give a prompt of text"
    if max(sizes.values()) > size:
        return (
            f"an item has {max(sizes.values())} embeddings, more than encoder_cache_size={size}: give a smaller image, "
            "or a shorter video, or raise encoder_cache_size"
        )
    return (
        f"the items have {sum(sizes.values())} embeddings together, more than encoder_cache_size={size}, and without "
        "enable_chunked_prefill all are encoded in one step: give fewer or smaller ones, or raise encoder_cache_size"
    )


class Deadlines:
    def __init__(self) -> None:
        self._deadlines: dict[int, float] = {}  # by group
        # Entries of groups that have ended are dropped when they reach the top, or once they are the majority.
        self._heap: list[tuple[float, int]] = []
        # No group's deadline is before this.
        self.first = math.inf

    def add(self, group: int, deadline: float) -> None:
        self.first = min(self.first, deadline)
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
        self.first = self._heap[0][0] if self._heap else math.inf
        return due
