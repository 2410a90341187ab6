"""Embeddings of items take the place of placeholders: a prompt with items gives the bits of one that spells out their
tokens, however its steps are cut."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from protos import step_pb2
from protos.inference_pb2 import SamplingParams
from tests.fakes.fake_runner import fake_runner
from tests.support.models.spelled_items import PLACEHOLDER, SEPARATOR, SpelledEncoder, item_runner, to_encode
from tests.support.models.stages import make_model
from tests.support.scheduler.steps import decodes, said
from worker.cpu.runner import Runner
from worker.errors import PlanError

SAMPLING = SamplingParams(temperature=0.0, logprobs=2, max_tokens=20)
FIRST, SECOND = [11, 12, 13, 14, 15, 16, 17], [21, 22, 23, 24]
# Text, an item, text, another one, text; what a router sends for it; and where the items are.
SPELLED = [5, 6, 7, *FIRST, 8, *SECOND[:2], SEPARATOR, *SECOND[2:], 9, 10]
PROMPT = [5, 6, 7, *[PLACEHOLDER] * 7, 8, PLACEHOLDER, PLACEHOLDER, SEPARATOR, PLACEHOLDER, PLACEHOLDER, 9, 10]
ITEMS = [
    step_pb2.RowItem(number=1, first_token=3, num_tokens=7, grid=[1, 1, 7]),
    step_pb2.RowItem(number=2, first_token=11, num_tokens=5, grid=[1, 1, 5]),
]
# A placeholder token that stands outside of any item is text.
BARE = [PLACEHOLDER, 3, 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")


def prepared(runner: Runner, *messages: step_pb2.ItemToEncode) -> list[tuple[int, str]]:
    """Waits until the items are prepared."""
    assert runner.items is not None
    done = threading.Semaphore(0)
    for message in messages:
        runner.items.prepare(message, done.release)
    for _ in messages:
        assert done.acquire(timeout=30)
    return runner.items.take_done()


def prepare_both(runner: Runner) -> None:
    assert prepared(runner, to_encode(1, FIRST), to_encode(2, SECOND)) == [(1, ""), (2, "")]


def new_row(
    tokens: Sequence[int],
    *,
    row: int = 0,
    sequence: int = 1,
    blocks: Sequence[int] = range(1, 6),
    computed: int = 0,
    items: Sequence[step_pb2.RowItem] = (),
    num_prompt_tokens: int = 0,
) -> step_pb2.NewRow:
    return step_pb2.NewRow(
        row=row,
        sequence=sequence,
        token_ids=tokens,
        num_prompt_tokens=num_prompt_tokens or len(tokens),
        block_ids=blocks,
        num_computed_tokens=computed,
        sampling=SAMPLING,
        items=items,
    )


def step(runner: Runner, **fields: object) -> tuple[list[int], list[bytes]]:
    """Computes a plan. Returns its tokens and their logprobs, bit by bit."""
    result = runner.execute(step_pb2.StepPlan(**fields))  # type: ignore[arg-type]
    assert not result.failed_sequences
    return said(result).token_ids, [each.SerializeToString() for each in result.logprobs]


def run(
    runner: Runner, tokens: Sequence[int], cuts: Sequence[int], items: Sequence[step_pb2.RowItem] = (), count: int = 6
) -> list[object]:
    """Computes a prompt in chunks that end at `cuts`, then `count` tokens. Encodes each item before the first chunk
    that needs it."""
    outputs: list[object] = []
    done, waiting = 0, list(items)
    for end in [*cuts, len(tokens)]:
        needed = [item.number for item in waiting if item.first_token < end]
        waiting = [item for item in waiting if item.number not in needed]
        fields: dict[str, object] = {"new_rows": [new_row(tokens, items=items)]} if not done else {}
        outputs.append(step(runner, rows=[0], num_tokens=[end - done], encoded_items=needed, **fields))
        done = end
    outputs = outputs[-1:]
    for _ in range(count):
        outputs.append(step(runner, decode_rows=decodes(0)))
    return outputs


@pytest.fixture(scope="module")
def expected(model: Path) -> list[object]:
    runner, _ = item_runner(model)
    outputs = run(runner, SPELLED, [])
    assert outputs != run(item_runner(model)[0], PROMPT, []), "the placeholder's own embedding must not do"
    return outputs


def started(model: Path, **changes: object) -> tuple[Runner, SpelledEncoder]:
    runner, encoder = item_runner(model, **changes)  # type: ignore[arg-type]
    prepare_both(runner)
    return runner, encoder


@pytest.mark.parametrize("has_axes", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_items_are_as_their_tokens_spelled_out(
    model: Path, expected: list[object], native: bool, has_axes: bool
) -> None:
    reference = run(item_runner(model, native=native)[0], SPELLED, [])
    runner, encoder = started(model, native=native, has_axes=has_axes)
    assert run(runner, PROMPT, [], ITEMS) == reference
    assert encoder.num_encoded == 2
    if native:
        assert reference == expected


@pytest.mark.parametrize("has_axes", [False, True])
@pytest.mark.parametrize("cuts", [[1], [3], [4], [9], [10], [12], [14], [17], [2, 5, 6, 13], [*range(1, 18)]])
def test_chunks_may_end_anywhere(model: Path, expected: list[object], cuts: list[int], has_axes: bool) -> None:
    runner, _ = started(model, has_axes=has_axes)
    assert run(runner, PROMPT, cuts, ITEMS) == expected


def test_a_prompt_may_end_in_an_item_that_a_decode_computes(model: Path) -> None:
    """A row whose last prompt token alone is left is planned like one that decodes: C++ fills the batch."""
    spelled, tokens = [5, *FIRST], [5, *[PLACEHOLDER] * 7]
    item = [step_pb2.RowItem(number=1, first_token=1, num_tokens=7, grid=[1, 1, 7])]
    for has_axes in (False, True):
        runner, _ = item_runner(model, has_axes=has_axes)
        step(runner, new_rows=[new_row(spelled)], rows=[0], num_tokens=[7])
        reference = [step(runner, decode_rows=decodes(0)) for _ in range(3)]
        runner, _ = started(model, has_axes=has_axes)
        step(runner, new_rows=[new_row(tokens, items=item)], rows=[0], num_tokens=[7], encoded_items=[1])
        assert [step(runner, decode_rows=decodes(0)) for _ in range(3)] == reference


def test_rows_with_items_and_without_share_steps(model: Path, expected: list[object]) -> None:
    """Steps of text are replayed from a recording, those with items are not: both compute the same."""
    for has_axes in (False, True):
        alone, _ = item_runner(model, has_axes=has_axes)
        text = [step(alone, new_rows=[new_row(BARE)], rows=[0], num_tokens=[3])]
        text += [step(alone, decode_rows=decodes(0)) for _ in range(8)]

        runner, _ = started(model, has_axes=has_axes)
        other = new_row(BARE, row=3, sequence=2, blocks=[9, 10])
        outputs = [step(runner, new_rows=[other], rows=[3], num_tokens=[3])]
        outputs += [step(runner, decode_rows=decodes(3)) for _ in range(2)]
        first = {"new_rows": [new_row(PROMPT, items=ITEMS)], "encoded_items": [1]}
        outputs.append(step(runner, decode_rows=decodes(3), rows=[0], num_tokens=[8], **first))
        both = step(runner, decode_rows=decodes(3), rows=[0], num_tokens=[10], encoded_items=[2])
        with_items = []
        for _ in range(4):
            outputs.append((both[0][:1], both[1][:1]))
            with_items.append((both[0][1:], both[1][1:]))
            both = step(runner, decode_rows=decodes(3, 0))
        outputs.append((both[0][:1], both[1][:1]))
        assert outputs == text
        assert with_items == expected[:4]


@pytest.mark.parametrize("computed", [8, 16])
def test_a_prefix_hit_may_end_within_an_item(model: Path, expected: list[object], computed: int) -> None:
    """Blocks of 8 tokens: the first ends within the first item, the second within and behind the second one."""
    for has_axes in (False, True):
        runner, encoder = started(model, has_axes=has_axes)
        run(runner, PROMPT, [], ITEMS, count=0)
        shared = [*range(1, 1 + computed // 8), 20, 21, 22]
        hit = new_row(PROMPT, row=1, sequence=2, blocks=shared, computed=computed, items=ITEMS)
        outputs: list[object] = [step(runner, new_rows=[hit], rows=[1], num_tokens=[len(PROMPT) - computed])]
        outputs += [step(runner, decode_rows=decodes(1)) for _ in range(6)]
        assert outputs == expected
        assert encoder.num_encoded == 2, "the cache has both items"


@pytest.mark.parametrize("swaps", [False, True])
def test_a_preempted_sequence_comes_back_with_its_items(model: Path, expected: list[object], swaps: bool) -> None:
    for has_axes in (False, True):
        runner, encoder = started(model, has_axes=has_axes, num_swap_blocks=4)
        outputs = run(runner, PROMPT, [9], ITEMS, count=3)
        tokens = [*PROMPT, *(token for [token], _ in outputs)]  # type: ignore[misc]
        back = new_row(tokens, row=2, sequence=7, blocks=[31, 32, 33, 34], items=ITEMS, num_prompt_tokens=len(PROMPT))
        if swaps:
            out = {"swap_out_blocks": [1, 2, 3], "swap_out_host_blocks": [2, 0, 1]}
            step(runner, freed_rows=[0], new_rows=[new_row(BARE, blocks=[1, 2])], rows=[0], num_tokens=[3], **out)
            back.num_computed_tokens = len(tokens) - 1
            back_in = {"swap_in_blocks": [31, 32, 33], "swap_in_host_blocks": [2, 0, 1]}
            outputs.append(step(runner, new_rows=[back], decode_rows=decodes(2), **back_in))
        else:
            # Their embeddings went meanwhile: both items are encoded again, from inputs that are made again.
            drop = {"freed_rows": [0], "dropped_items": [1, 2], "encoded_items": [2, 1]}
            outputs.append(step(runner, new_rows=[back], rows=[2], num_tokens=[len(tokens)], **drop))
        outputs += [step(runner, decode_rows=decodes(2)) for _ in range(2)]
        assert outputs == expected
        assert encoder.num_encoded == (2 if swaps else 4)


def test_the_cache_gives_room_back_and_forgets_with_the_epoch(model: Path) -> None:
    runner, _ = started(model, cache_size=11)
    assert runner.items is not None
    run(runner, PROMPT, [], ITEMS, count=0)
    assert runner.items.cache.num_embeddings == 11
    assert prepared(runner, to_encode(3, [31, 32, 33])) == [(3, "")]
    item = [step_pb2.RowItem(number=3, first_token=0, num_tokens=3, grid=[1, 1, 3])]
    other = new_row([PLACEHOLDER] * 3, row=1, sequence=2, blocks=[20], items=item)
    plan = {"dropped_items": [2], "forgotten_items": [2], "encoded_items": [3]}
    step(runner, freed_rows=[0], new_rows=[other], rows=[1], num_tokens=[3], **plan)
    assert runner.items.cache.num_embeddings == 10
    runner.reset()
    assert runner.items.cache.num_embeddings == runner.items.preparations.num_bytes == 0
    # Numbers begin again, and mean other items.
    assert prepared(runner, to_encode(1, SECOND)) == [(1, "")]
    with pytest.raises(PlanError, match="encoded_items: item 2 is not prepared"):
        runner.execute(step_pb2.StepPlan(new_rows=[new_row(BARE)], rows=[0], num_tokens=[3], encoded_items=[1, 2]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoded_items": [1, 2, 9]}, "encoded_items: item 9 is not prepared"),
        ({"encoded_items": [1, 2, 1]}, "encoded_items: item 1 is encoded already; drop it first"),
        ({"encoded_items": [1]}, "rows: the step computes tokens of item 2, which no plan has encoded"),
        ({"dropped_items": [1]}, "dropped_items: the cache has no embeddings of item 1"),
    ],
)
def test_plans_that_cannot_be_are_refused_with_field_and_value(model: Path, fields: dict, message: str) -> None:
    runner, _ = started(model)
    plan = step_pb2.StepPlan(new_rows=[new_row(PROMPT, items=ITEMS)], rows=[0], num_tokens=[18], **fields)
    with pytest.raises(PlanError, match=message):
        runner.execute(plan)


def test_items_that_do_not_fit_are_refused(model: Path) -> None:
    def refused(message: str, *items: step_pb2.RowItem, **changes: object) -> None:
        runner, _ = started(model, **changes)
        new = new_row(PROMPT, items=items)
        with pytest.raises(PlanError, match=message):
            runner.execute(step_pb2.StepPlan(new_rows=[new], rows=[0], num_tokens=[18], encoded_items=[1, 2]))

    item = step_pb2.RowItem
    refused("item 2 of row 0 has tokens 9 to 14; items", ITEMS[0], item(number=2, first_token=9, num_tokens=5))
    refused("item 1 of row 0 has tokens 12 to 19", item(number=1, first_token=12, num_tokens=7))
    refused("item 1 has 7 embeddings, and tokens for 8", item(number=1, first_token=3, num_tokens=9))
    refused("has 7 tokens and the grid", item(number=1, first_token=3, num_tokens=7, grid=[1, 2, 3]), has_axes=True)
    refused("item 2 has 4 embeddings, and 3 of encoder_cache_size=10 are free", *ITEMS, cache_size=10)


def test_a_model_without_an_encoder_refuses_items() -> None:
    new = step_pb2.NewRow(sequence=1, token_ids=[1, 2], num_prompt_tokens=2, block_ids=[1], items=ITEMS[:1])
    with pytest.raises(PlanError, match="new_rows: row 0 has 1 items; the model here takes text only"):
        fake_runner().execute(step_pb2.StepPlan(new_rows=[new], rows=[0], num_tokens=[2]))
    new.ClearField("items")
    with pytest.raises(PlanError, match="encoded_items: 4, but this rank has no encoder"):
        fake_runner().execute(step_pb2.StepPlan(new_rows=[new], rows=[0], num_tokens=[2], encoded_items=[4]))
