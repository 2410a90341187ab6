"""One side of the tcp connections between a scheduler and a worker is gone without a word to the other: both find out.

A relay resets one side of each connection and goes on reading the other. Before this was noticed, the worker waited for
plans until TCP gave up, after 15 minutes, or for ever behind a proxy.
"""

import time
from pathlib import Path

import pytest

from benchmarks.faults.means.relay import Relays
from runtime.security.curve import make_keys
from tests.fakes.hash_runner import HashModel
from tests.support.ports import free_ports
from tests.support.scheduler.scheduling import RouterEnd, make_options, running_scheduler, running_worker

PROMPT = list(range(20, 60))
NUM_TOKENS = 400


@pytest.mark.parametrize(
    "keep_worker", [True, False], ids=["the scheduler's side is gone", "the worker's side is gone"]
)
async def test_streams_go_on_over_new_connections(tmp_path: Path, keep_worker: bool):
    make_keys(tmp_path / "keys")
    own, relayed = free_ports(2), free_ports(2)
    common = {"curve_dir": str(tmp_path / "keys"), "heartbeat_timeout": 2.5}
    options = make_options(tmp_path, step_addresses=(f"tcp://127.0.0.1:{own}",), **common)
    at_worker = make_options(tmp_path, step_addresses=(f"tcp://127.0.0.1:{relayed}",), **common)
    with Relays([(relayed, own), (relayed + 1, own + 1)]) as relays:
        async with (
            running_scheduler(options) as server,
            running_worker(at_worker, before_step=lambda plan: time.sleep(0.005)),
            RouterEnd(server.address) as router,
        ):
            group = await router.submit(PROMPT, max_tokens=NUM_TOKENS, seed=3)
            await router.wait_for(lambda: router.tokens[group, 0])
            for relay in relays.all:
                relays.call(lambda relay=relay: relay.forget_one_side(keep_dialer=keep_worker))
            await router.finish(group)
            assert router.tokens[group, 0] == HashModel().generate(PROMPT, NUM_TOKENS, seed=3)
            assert len(router.welcomes) == 2
