"""Random walks: a core under random settings and a random load.

A seed determines the walk, so that a failure can be reproduced.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType

from scheduler.core.core import Core
from scheduler.core.messages import CoreSettings
from tests.fakes.model import VOCAB_SIZE
from tests.fakes.plan_worker import Drafter
from tests.properties.pace import StepTimes
from tests.properties.workloads import Workload, random_settings, step_costs
from tests.properties.world import World

MOST_STEPS = 400


class WalkError(AssertionError):
    """An invariant did not hold. The message says how to reproduce it."""


@dataclass(frozen=True, slots=True)
class Walk:
    settings: CoreSettings
    num_steps: int
    seen: Counter[str]


def walk(seed: str, *, core_class: type[Core] = Core, changes: Mapping[str, object] = MappingProxyType({})) -> Walk:
    """Takes one walk of up to MOST_STEPS plans. changes: to its settings. Raises WalkError."""
    choose = Random(seed)
    aging = Random(f"aging {seed}").choice([0.0, 0.0, 1.0, 5.0])
    holds = Random(f"constraints {seed}").random() < 0.5
    of_items, of_pace = Random(f"items {seed}"), Random(f"pace {seed}")
    own = {
        "priority_aging": aging,
        "holds_constrained": holds,
        "encoder_cache_size": of_items.choice([0, 0, 0, 9, 12, 20]),
        "max_num_encoder_input_tokens": of_items.choice([1, 6, 10, 40]),
        "inter_token_latency_target": of_pace.choice([0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.02, 0.04]),
        "least_prefill_tokens": of_pace.choice([1, 1, 3, 32]),
    }
    settings = random_settings(choose, own | dict(changes))
    walker = _Walker(seed, choose, settings, core_class)
    try:
        walker.run()
    except Exception as error:
        step = walker.world.num_plans
        raise WalkError(f"seed {seed!r}, plan {step}: {type(error).__name__}: {error}; {settings}") from error
    world = walker.world
    world.seen[f"policy: {settings.scheduling_policy}"] += world.num_plans
    world.seen[f"tenants: {len(walker.tenants)}"] += world.num_plans
    world.seen[f"chunked prefill: {settings.enable_chunked_prefill}"] += world.num_plans
    world.seen[f"preemption rule: {settings.preemption_policy}"] += world.num_plans
    return Walk(settings, world.num_plans, world.seen)


def walks(seed: int, num_steps: int) -> Iterator[Walk]:
    """Yields walks until they have made at least num_steps plans in all."""
    index = 0
    while num_steps > 0:
        each = walk(f"{seed}/{index}")
        yield each
        num_steps -= each.num_steps
        index += 1


class _Walker:
    def __init__(self, seed: str, choose: Random, settings: CoreSettings, core_class: type[Core]) -> None:
        self._choose = choose
        # Tenants and constraints have generators of their own, as empty steps do.
        self.tenants = Random(f"tenants {seed}").choice([("",), ("a",), ("a", "b", "c")])
        constrained = Random(f"constrained {seed}").choice([0.0, 0.0, 0.0, 0.3, 1.0])
        predictable = 0.7 if settings.speculation else 0.0
        # So have items.
        self._choose_items = Random(f"items of {seed}")
        items = self._choose_items.choice([0.3, 1.0]) if settings.encoder_cache_size else 0.0
        self._workload = replace(
            Workload.random(choose),
            tenants=self.tenants,
            constrained=constrained,
            predictable=predictable,
            items=items,
        )
        self._swiftness = self._choose_items.choice([0.2, 0.6, 1.0])
        self.world = World(
            settings,
            core_class=core_class,
            seed=choose.randrange(2**32),
            diligence=choose.choice([1.0, 1.0, 1.0, 0.05]),
        )
        # How often requests come, how far results lag behind, how much goes wrong.
        self._arrivals = choose.choice([0.05, 0.3, 1.0])
        self._patience = choose.choice([0.0, 0.3, 0.7])
        self._mishaps = choose.choice([0.0, 0.01, 0.05])
        self._drafter = self._make_drafter()
        # How often an empty step is taken, as other replicas may request. It has its own generator, so that walks
        # without empty steps stay as they were.
        self._choose_empty = Random(f"empty {seed}")
        # The costs of steps that the core is told, with a generator of its own as well.
        self._choose_costs = Random(f"costs {seed}")
        # The times of steps, only where they count: so other walks stay as they were.
        self._times = StepTimes(Random(f"times {seed}")) if settings.inter_token_latency_target else None
        self._emptiness = self._choose_empty.choice([0.0, 0.0, 0.0, 0.0, 0.2, 0.6])

    def _make_drafter(self) -> Drafter | None:
        speculation = self.world.settings.speculation
        if speculation is None or not speculation.workers_draft:
            return None
        most = speculation.num_speculative_tokens
        choose, skill = self._choose, self._choose.choice([0.0, 0.5, 0.9])

        def guess(true_tokens: list[int]) -> tuple[int, ...]:
            """Drafts of up to `most` tokens: the true next ones, or with some probability others."""
            count = choose.randint(0, most)
            return tuple(
                token if choose.random() < skill else choose.randrange(VOCAB_SIZE) for token in true_tokens[:count]
            )

        return guess

    def run(self) -> None:
        world, choose = self.world, self._choose
        length = choose.randint(20, MOST_STEPS)
        idle = 0
        while world.num_plans < length and idle < 50:
            before = world.num_plans
            self._act()
            idle = idle + 1 if world.num_plans == before and not world.live else 0
        world.drain()
        # Run once more from idle: anything left behind would show.
        self._submit()
        world.drain()

    def _act(self) -> None:
        world, choose = self.world, self._choose
        if choose.random() < self._arrivals and len(world.live) < 24:
            for _ in range(choose.choice([1, 1, 1, 6])):
                self._submit()
        if choose.random() < 0.05:
            world.pass_time(choose.randint(0, 16) / 2)
        if world.live and choose.random() < 0.02:
            self._cancel()
        if choose.random() < self._mishaps:
            self._mishap()
        if world.settings.speculation and self._choose_costs.random() < 0.05:
            world.core.set_costs(step_costs(self._choose_costs.choice([0.0, 0.0, 0.1, 0.4])))
            world.seen["costs told"] += 1
        while world.unanswered and self._choose_items.random() < self._swiftness:
            number = self._choose_items.choice(sorted(world.unanswered))
            world.answer_item(number, failing=self._choose_items.random() < self._mishaps)
        self._step()

    def _step(self) -> None:
        """Makes a plan if possible, then delivers results as they come."""
        world, choose = self.world, self._choose
        drafter = self._drafter if choose.random() < 0.8 else None
        if self._choose_empty.random() < self._emptiness / 4:
            world.schedule_empty()
        is_planned = world.schedule(failing=choose.random() < self._mishaps, drafter=drafter)
        if not is_planned and self._choose_empty.random() < self._emptiness:
            world.schedule_empty()
        if is_planned and choose.random() < self._patience:
            return
        while world.in_flight:
            if self._times is not None:
                world.pass_time(self._times.seconds(world.in_flight[0].plan))
            world.deliver(forget=choose.random() < self._mishaps / 4, strays=choose.random() < self._mishaps)
            if choose.random() < self._patience:
                return

    def _submit(self) -> None:
        world = self.world
        request = self._workload.request(self._choose, world.num_groups + 1, world.now, world.settings)
        world.submit(request)

    def _cancel(self) -> None:
        world, choose = self.world, self._choose
        group, choice = choose.choice(sorted(world.live))
        world.cancel(group, None if choose.random() < 0.5 else [choice])
        world.cancel(world.num_groups + 7, None)

    def _lose_workers(self) -> None:
        world, choose = self.world, self._choose
        has_failed = choose.random() < 0.7
        if choose.random() < 0.3:
            num_blocks = choose.randint(16, 48) // world.settings.block_size
            world.lose_workers(num_blocks, choose.choice([0, 4, 12, 40]), has_failed=has_failed)
        else:
            world.lose_workers(has_failed=has_failed)

    def _mishap(self) -> None:
        world, choose = self.world, self._choose
        match choose.randrange(4):
            case 0:
                # After several losses in a row, a step may be the cause.
                for _ in range(choose.choice([1, 1, 3, 6])):
                    self._lose_workers()
                    self._step()
            case 1:
                world.reset_prefix_cache()
            case 2:
                world.watch_cache(choose.random() < 0.8)
            case _:
                world.deliver_again([flight.result for flight in list(world.in_flight)[1:]])
