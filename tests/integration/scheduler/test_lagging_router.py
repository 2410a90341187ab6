"""A router that reads its Session late gets what waits in few messages."""

from pathlib import Path

from tests.fakes.hash_runner import HashModel
from tests.support.scheduler.scheduling import RouterEnd, make_options, running_scheduler, running_worker

PROMPT = list(range(20, 60))


async def test_a_router_that_lags_gets_the_steps_that_wait_in_one_message(tmp_path: Path):
    """Each step used to be a message of its own, so a router that lagged fell ever further behind."""
    options, model, num_tokens = make_options(tmp_path), HashModel(), 400
    async with (
        running_scheduler(options) as server,
        running_worker(options, model=model),
        RouterEnd(server.address) as watcher,
        RouterEnd(server.address) as router,
    ):
        group = await router.submit(PROMPT, max_tokens=num_tokens, choices=range(4), seed=3, ignore_eos=True)
        router.reading.clear()
        await watcher.wait_for(lambda: watcher.loads and watcher.loads[-1].last_step >= num_tokens)
        await watcher.wait_idle()
        router.reading.set()
        for choice in range(4):
            await router.finish(group, choice)
            assert router.tokens[group, choice] == model.generate(
                PROMPT, num_tokens, seed=3, choice=choice, ignore_eos=True
            )
        assert (await router.wait_idle()).last_step >= num_tokens
        # Up to 200 messages of one step fit into the 8 KB that may be under way; the other steps are together.
        assert router.most_entries >= 4 * 50
