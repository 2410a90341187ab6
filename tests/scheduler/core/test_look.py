"""A look at a core shows its sequences, and a map of its blocks that adds up."""

from scheduler.core.core import Core
from scheduler.core.messages import ChoiceStart, CoreSettings, GroupRequest, StopRules


def core(num_blocks: int) -> Core:
    return Core(
        CoreSettings(block_size=4, num_blocks=num_blocks, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)
    )


def submit(core: Core, group: int, num_tokens: int) -> None:
    request = GroupRequest(
        group=group,
        request_id=f"r{group}",
        prompt_token_ids=tuple(range(100 * group, 100 * group + num_tokens)),
        choices=(ChoiceStart(choice=0),),
        stop=StopRules(max_tokens=5),
        sampling=None,
    )
    assert core.submit(request, 0.0) is None


def test_running_sequences_come_first_and_blocks_add_up() -> None:
    of = core(30)
    for group in range(3):
        submit(of, group, 10)
    assert of.schedule(1.0) is not None
    look = of.look()
    assert [(each.request_id, each.status) for each in look.sequences] == [
        ("r0", "running"),
        ("r1", "running"),
        ("r2", "waiting"),
    ]
    assert [each.num_prompt_tokens for each in look.sequences] == [10, 10, 10]
    assert look.sequences[2].num_blocks == 0
    # A cell a block: 255 or 0.
    assert len(look.used) == 30
    assert set(look.used) == {0, 255}
    assert look.used.count(255) == sum(each.num_blocks for each in look.sequences) == 30 - of.load.num_free_blocks


def test_large_pools_are_looked_at_in_part() -> None:
    of = core(100_000)
    submit(of, 1, 10)
    assert of.schedule(1.0) is not None
    look = of.look()
    assert (len(look.used), len(look.cached)) == (512, 512)
    assert look.used[0] > 0
    assert not any(look.used[1:])
