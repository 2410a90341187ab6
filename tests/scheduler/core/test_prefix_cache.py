"""Prefix matching: which prefixes count as equal, and which tokens a hit leaves to compute."""

import dataclasses
import hashlib
import struct

from scheduler.core.messages import StopRules
from scheduler.core.state.blocks import BlockPool, PrefixCache
from scheduler.core.state.request import Group, Sequence
from tests.support.scheduler.core import CoreDriver, make_request


def make_sequence(cache: PrefixCache, prompt: range | list[int], *, group: int = 1, **fields: object) -> Sequence:
    request = make_request(group, prompt, **fields)  # type: ignore[arg-type]
    scope = cache.scope_of(request)
    return Sequence(
        Group(request, eos_token_ids=frozenset(), block_size=4, cache_scope=scope), request.choices[0], (0, group, 0)
    )


def write(pool: BlockPool, cache: PrefixCache, sequence: Sequence) -> list[int]:
    """Publishes a sequence as if all of it were computed; returns its blocks."""
    blocks = pool.take(-(-sequence.num_tokens // 4))
    sequence.start(row=0, generation=1, block_ids=blocks, num_computed_tokens=sequence.num_tokens)
    cache.publish(sequence)
    return blocks


def test_a_name_is_the_sha256_of_the_one_before_it_and_the_tokens():
    """The names must not change: other tools compute them, too, to route by prefix."""

    def field(content: bytes) -> bytes:
        return struct.pack("<I", len(content)) + content

    pool = BlockPool(10)
    cache = PrefixCache(pool, 4, enabled=True)
    blocks = write(pool, cache, make_sequence(cache, range(1, 9), cache_salt="s"))
    parent = hashlib.sha256(b"\x00" + b"".join(map(field, [b"octavo.kv-block.v2", b"salt", b"s"]))).digest()
    for block, token_ids in zip(blocks, [(1, 2, 3, 4), (5, 6, 7, 8)], strict=True):
        parent = hashlib.sha256(b"\x01" + parent + struct.pack("<4i", *token_ids)).digest()
        assert pool.find(parent) == block


def test_only_whole_equal_prefixes_of_equal_salt_match():
    pool = BlockPool(10)
    cache = PrefixCache(pool, 4, enabled=True)
    blocks = write(pool, cache, make_sequence(cache, range(12), cache_salt="s"))

    def match(prompt: list[int], salt: str = "s") -> list[int]:
        return cache.match(make_sequence(cache, prompt, group=2, cache_salt=salt))

    assert match([*range(12), 1]) == blocks
    assert match([*range(11), 1, 2]) == blocks[:2]
    # The second block's tokens are cached, but after another first block.
    assert match([9, 9, 9, 9, *range(4, 12), 1]) == []
    assert match([*range(12), 1], salt="") == []
    assert match([*range(12), 1], salt="t") == []


def test_a_full_hit_leaves_the_last_block_to_compute():
    """Otherwise nothing could be sampled, and no shared block may be written."""
    pool = BlockPool(10)
    cache = PrefixCache(pool, 4, enabled=True)
    blocks = write(pool, cache, make_sequence(cache, range(8)))
    assert cache.match(make_sequence(cache, range(8), group=2)) == blocks[:1]


def test_disabled_only_choices_of_one_group_share():
    pool = BlockPool(20)
    cache = PrefixCache(pool, 4, enabled=False)
    alone = make_sequence(cache, range(9))
    write(pool, cache, alone)
    assert cache.match(make_sequence(cache, range(9))) == []
    blocks = write(pool, cache, make_sequence(cache, range(9), group=2, choices=2))
    assert cache.match(make_sequence(cache, range(9), group=2, choices=2)) == blocks[:2]
    assert cache.match(make_sequence(cache, range(9), group=3, choices=2)) == []


def test_a_finished_request_serves_the_next_one_its_output_included():
    """A chat's next turn begins with the last one's prompt and answer."""
    driver = CoreDriver()
    driver.submit(make_request(1, range(6), max_tokens=7))
    driver.finish()
    prompt = [*range(6), *driver.tokens[1, 0]]
    driver.submit(make_request(2, [*prompt, 1]))
    plan = driver.step()
    # 12 of the 13 tokens: the last one was sampled but never computed.
    assert plan is not None
    assert plan.new_rows[0].num_computed_tokens == 12
    driver.finish()
    assert driver.ends[2, 0].num_cached_tokens == 12
    assert driver.core.stats.num_prefix_hits == 12
    assert driver.core.stats.num_prefix_queries == 6 + 14


def test_a_reader_shares_the_step_with_the_writer():
    driver = CoreDriver()
    driver.submit(make_request(1, range(10)))
    driver.submit(make_request(2, [*range(8), 1, 1]))
    plan = driver.step()
    assert plan is not None
    first, second = plan.new_rows
    assert second.num_computed_tokens == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    assert plan.chunks == [(first.row, 10), (second.row, 2)]
    driver.finish()


def test_cached_blocks_give_way_to_requests():
    driver = CoreDriver(num_blocks=4)
    driver.submit(make_request(1, range(12)))
    driver.finish()
    driver.submit(make_request(2, range(20, 32)))
    driver.finish()
    driver.submit(make_request(3, range(12)))
    plan = driver.step()
    assert plan is not None
    assert plan.new_rows[0].num_computed_tokens == 0
    driver.finish()


def test_num_cached_tokens_counts_prompt_tokens_only():
    driver = CoreDriver()
    driver.submit(make_request(1, range(6), max_tokens=8))
    driver.finish()
    output = tuple(driver.tokens[1, 0][:7])
    resumed = make_request(2, range(6), stop=StopRules(max_tokens=8, ignore_eos=True)).choices[0]
    driver.submit(make_request(2, range(6), max_tokens=8, choices=[type(resumed)(choice=0, output_token_ids=output)]))
    driver.finish()
    assert driver.ends[2, 0].num_cached_tokens == 6
    assert driver.tokens[2, 0] == driver.tokens[1, 0]


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt_and_leaves_it_for_others():
    driver = CoreDriver()
    driver.submit(make_request(1, range(10)))
    driver.finish()
    driver.submit(make_request(2, range(10), choices=2, bypass_prefix_cache=True))
    plan = driver.step()
    assert plan is not None
    assert [row.num_computed_tokens for row in plan.new_rows] == [0, 8]
    driver.finish()


def test_what_failed_is_not_served_to_others():
    """KV that is not finite would poison every later request of that prefix."""
    driver = CoreDriver()
    driver.submit(make_request(1, range(10)))
    step = driver.schedule()
    assert step is not None
    plan, result = step
    sequence = plan.new_rows[0].sequence
    driver.apply(dataclasses.replace(result, failed=frozenset({sequence})))
    driver.submit(make_request(2, range(10)))
    plan = driver.step()
    assert plan is not None
    assert plan.new_rows[0].num_computed_tokens == 0
    driver.finish()
