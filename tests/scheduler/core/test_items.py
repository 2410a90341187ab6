"""Items in the core: when they are asked for, encoded, kept and given up, and what a prefill waits for."""

import dataclasses
from typing import Any

from runtime.block_hashes import hash_prompt_blocks, scope_of
from scheduler.core.messages import FinishReason, ItemSpan, Plan, WantedItem
from tests.support.scheduler.core import CoreDriver, make_request


def span(index: int, first_token: int, num_tokens: int = 4) -> ItemSpan:
    return ItemSpan(name=bytes([index]) * 32, first_token=first_token, num_tokens=num_tokens, num_embeddings=num_tokens)


class ItemDriver(CoreDriver):
    """Passes items on to the worker. Those that it prepares by itself are told before each step."""

    def __init__(self, *, size: int = 20, prepares: bool = True, **changes: Any) -> None:
        settings: dict[str, Any] = {"encoder_cache_size": size, "max_num_encoder_input_tokens": 8}
        super().__init__(**(settings | changes))
        self.prepares = prepares
        self.wanted: list[WantedItem] = []

    def _make_worker(self, num_blocks: int):
        worker = super()._make_worker(num_blocks)
        worker.encoder_cache_size = self.settings.encoder_cache_size
        return worker

    def take(self) -> None:
        for item in self.core.take_wanted_items():
            self.worker.receive(item)
            self.wanted.append(item)

    def prepare(self, *numbers: int) -> None:
        for number in numbers:
            self.worker.prepare(number)
            self.core.item_prepared(number)

    def schedule(self, now: float = 0.0):
        self._serve()
        found = super().schedule(now)
        # The plan may have asked for more.
        return super().schedule(now) if found is None and self._serve() else found

    def _serve(self) -> bool:
        """Prepares what is wanted; False if there is nothing."""
        self.take()
        if not self.prepares or not self.wanted:
            return False
        self.prepare(*(item.number for item in self.wanted if item.number not in self.worker.prepared))
        self.wanted.clear()
        return True

    def plans(self) -> list[Plan]:
        """Runs to the end; returns the plans."""
        plans = []
        while self.core.has_work:
            plan = self.step()
            assert plan is not None
            plans.append(plan)
        return plans


def encoded(plans: list[Plan]) -> list[list[int]]:
    return [plan.encoded_items for plan in plans if plan.encoded_items]


def test_a_chunk_is_cut_before_an_item_that_the_step_may_not_encode_any_more():
    driver = ItemDriver()
    driver.submit(make_request(1, range(20), items=(span(1, 2), span(2, 6), span(3, 12))))
    plans = driver.plans()
    assert [plan.chunks for plan in plans[:2]] == [[(0, 12)], [(0, 8)]]
    assert encoded(plans) == [[1, 2], [3]]


def test_one_item_that_is_more_than_a_step_encodes_is_encoded_alone():
    driver = ItemDriver()
    driver.submit(make_request(1, range(20), items=(span(1, 0, 12), span(2, 14))))
    assert encoded(driver.plans()) == [[1], [2]]


def test_an_item_is_encoded_once_for_requests_that_share_no_prefix():
    driver = ItemDriver()
    for group in range(1, 6):
        driver.submit(make_request(group, range(group * 20, group * 20 + 12), items=(span(1, 4),)))
    assert encoded(driver.plans()) == [[1]]
    assert (driver.core.stats.num_item_queries, driver.core.stats.num_item_hits) == (5, 4)


def test_a_prefix_hit_that_covers_an_item_needs_neither_input_nor_encoder():
    driver = ItemDriver(size=4)
    driver.submit(make_request(1, range(16), items=(span(1, 2),)))
    driver.submit(make_request(2, range(50, 66), items=(span(2, 2),)))
    driver.finish()
    driver.prepares = False
    driver.submit(make_request(3, [*range(12), 1, 2, 3], items=(span(1, 2),)))
    assert not driver.wanted
    driver.finish()


def test_two_images_under_equal_tokens_share_no_blocks_behind_the_place_where_they_start():
    driver = ItemDriver()
    driver.submit(make_request(1, range(16), items=(span(1, 6),)))
    driver.finish()
    driver.submit(make_request(2, range(16), items=(span(2, 6),)))
    driver.finish()
    assert driver.ends[2, 0].num_cached_tokens == 4


def test_names_of_blocks_are_those_that_routers_compute():
    driver, items = ItemDriver(), (span(1, 1, 2), span(2, 3, 2), span(3, 9, 3))
    driver.submit(make_request(1, range(16), items=items))
    driver.finish()
    names = hash_prompt_blocks(range(16), 4, scope_of(""), [(each.first_token, each.name) for each in items])
    assert names == driver.core.cached_hashes()[:4]
    plain = hash_prompt_blocks(range(16), 4, scope_of(""))
    # The second block has no start of an item, but comes after one.
    assert not set(names) & set(plain)
    assert plain == hash_prompt_blocks(range(16), 4, scope_of(""), [])


def test_others_overtake_a_request_whose_item_is_being_prepared():
    driver = ItemDriver(prepares=False)
    driver.submit(make_request(1, range(8), items=(span(1, 2),)))
    driver.submit(make_request(2, range(50, 58)))
    assert driver.step() is not None
    assert driver.running() == {(2, 0)}
    (item,) = driver.wanted
    driver.prepare(item.number)
    driver.step()
    assert driver.running() == {(1, 0), (2, 0)}


def test_one_that_lacks_room_in_the_cache_stops_those_behind_it_from_encoding():
    driver = ItemDriver(size=8, max_num_batched_tokens=6, max_num_partial_prefills=3, max_long_partial_prefills=3)
    # The first step leaves both in the middle of an item, with the cache full.
    driver.submit(make_request(1, range(20), items=(span(1, 0), span(2, 4, 8))))
    driver.submit(
        make_request(2, range(100, 130), items=(span(3, 0), span(4, 4), span(5, 8), span(6, 12), span(7, 16)))
    )
    order = [number for plan in driver.plans() for number in plan.encoded_items]
    assert order.index(2) < order.index(5), "the second request fills the cache again and again"


def test_a_preempted_sequence_needs_its_items_again_and_finds_them_if_they_are_still_there():
    driver = ItemDriver(size=4, num_blocks=10, enable_prefix_caching=False)
    driver.submit(make_request(1, range(12), items=(span(1, 4),), max_tokens=12))
    driver.submit(make_request(2, range(20, 36), items=(span(2, 4),), max_tokens=12))
    plans = driver.plans()
    assert driver.core.stats.num_preemptions > 0
    assert encoded(plans) == [[1], [2]]
    assert (driver.core.stats.num_item_queries, driver.core.stats.num_item_hits) == (3, 1)


def test_an_input_that_is_needed_again_before_the_workers_forget_it_is_not_sent_again():
    driver = ItemDriver(prepares=False)
    driver.submit(make_request(1, range(8), items=(span(1, 2),)))
    driver.take()
    driver.prepare(driver.wanted.pop().number)
    driver.cancel(1)
    driver.submit(make_request(2, range(50, 58), items=(span(1, 2),)))
    assert encoded(driver.plans()) == [[1]]
    assert not driver.wanted


def test_an_item_that_can_not_be_prepared_ends_those_that_need_it_and_no_others():
    driver = ItemDriver(prepares=False)
    driver.submit(make_request(1, range(8), items=(span(1, 2),), choices=2))
    driver.submit(make_request(2, range(8), items=(span(2, 2),)))
    driver.take()
    ends = driver.core.item_failed(driver.wanted[0].number, "not an image", 0.0)
    driver.core.check_integrity()
    assert [(end.key, end.reason, end.is_invalid) for end in ends] == [
        ((1, 0), FinishReason.ERROR, True),
        ((1, 1), FinishReason.ERROR, True),
    ]
    assert not driver.core.item_failed(77, "never asked for", 0.0)
    driver.prepare(driver.wanted[1].number)
    driver.finish()


def test_a_new_epoch_wants_the_items_of_live_requests_again():
    driver = ItemDriver(prepares=False)
    driver.submit(make_request(1, range(8), items=(span(1, 2),)))
    driver.take()
    driver.prepare(driver.wanted[0].number)
    driver.step()
    driver.wanted.clear()
    driver.lose_workers()
    driver.core.item_prepared(1)
    assert driver.step() is None, "an answer of the old workers counts"
    driver.take()
    driver.prepare(*(item.number for item in driver.wanted))
    assert encoded(driver.plans()) == [[1]]


def test_a_smaller_cache_of_a_new_epoch_ends_what_no_longer_fits():
    driver = ItemDriver()
    driver.submit(make_request(1, range(16), items=(span(1, 2, 12),)))
    driver.submit(make_request(2, range(16), items=(span(2, 2),)))
    driver.core.lose_workers(0.0)
    driver.core.resize(100, encoder_cache_size=8, now=0.0)
    driver.settings = dataclasses.replace(driver.settings, encoder_cache_size=8)
    (end,) = driver.core.take_ends()
    assert end.key == (1, 0)
    assert "encoder_cache_size=8" in end.message
    driver.worker = driver._make_worker(100)
    driver.finish()


def test_what_never_fits_is_refused_by_name():
    rejection = ItemDriver().submit(make_request(1, range(30), items=(span(1, 0, 21),)))
    assert rejection is not None
    assert "21 embeddings, more than encoder_cache_size=20" in rejection.message
    rejection = ItemDriver(size=0).submit(make_request(1, range(30), items=(span(1, 0, 1),)))
    assert rejection is not None
    assert "the workers take none" in rejection.message
    whole = ItemDriver(size=6, enable_chunked_prefill=False)
    rejection = whole.submit(make_request(1, range(30), items=(span(1, 0), span(2, 4))))
    assert rejection is not None
    assert "8 embeddings together, more than encoder_cache_size=6" in rejection.message
    assert whole.submit(make_request(2, range(30), items=(span(1, 0), span(1, 4)))) is None
    assert encoded(whole.plans()) == [[1]]


def test_items_are_asked_for_ahead_only_as_far_as_the_window_goes():
    driver = ItemDriver(size=8, prepares=False)
    for group in range(1, 11):
        driver.submit(make_request(group, range(group * 20, group * 20 + 8), items=(span(group, 2),)))
    driver.take()
    assert len(driver.wanted) == 4, "twice the cache"
    driver.prepares = True
    driver.finish()


def test_a_request_that_errs_about_the_number_of_embeddings_harms_no_other():
    driver = ItemDriver(prepares=False)
    right = span(1, 2)
    driver.submit(make_request(1, range(8), items=(right,)))
    driver.submit(make_request(2, range(50, 58), items=(dataclasses.replace(right, num_embeddings=3),)))
    driver.take()
    assert [item.num_embeddings for item in driver.wanted] == [4, 3]
    ends = driver.core.item_failed(driver.wanted[1].number, "it has 4 embeddings, not 3", 0.0)
    assert [end.key for end in ends] == [(2, 0)]
    driver.prepare(driver.wanted[0].number)
    driver.finish()


def test_images_are_encoded_as_far_as_a_step_has_time_for_them():
    """While something decodes, under inter_token_latency_target."""
    driver = ItemDriver(
        size=400,
        max_num_encoder_input_tokens=200,
        inter_token_latency_target=0.1,
        least_prefill_tokens=2,
        num_blocks=500,
        max_num_batched_tokens=100,
    )
    now, names = 10.0, iter(range(1, 200))

    def step() -> tuple[float, int]:
        """Returns its seconds and the items that it encodes."""
        nonlocal now
        scheduled = driver.schedule(now)
        assert scheduled is not None
        plan, result = scheduled
        seconds = 0.001 + 0.001 * plan.num_tokens + 0.02 * len(plan.encoded_items)
        now += seconds
        driver.apply(result, now)
        return seconds, len(plan.encoded_items)

    def submit(group: int, num_items: int, max_tokens: int = 3) -> None:
        spans = tuple(span(next(names), 4 * index) for index in range(num_items))
        driver.submit(make_request(group, range(60), items=spans, max_tokens=max_tokens))

    for group in range(1, 25):
        submit(group, group % 4)
        while driver.core.has_work:
            step()
    submit(30, 0, max_tokens=60)
    step()
    submit(31, 12)
    steps = [step() for _ in range(8)]
    assert max(seconds for seconds, _ in steps) <= 0.105
    assert sum(num_items for _, num_items in steps) == 12
    # Alone they would go into one step.
    assert max(num_items for _, num_items in steps) == 4
