"""`octavo up` with several routers over the same schedulers, of stand-ins for all processes."""

import re
import signal
from pathlib import Path

from octavo import Client
from tests.support.up import Up

GRPC = re.compile(r"^gRPC +(\S+)$", re.MULTILINE)


def test_each_router_has_an_address_and_one_goes_on_where_another_was_killed(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with Up(tmp_path, "--num-routers=2", "--port=0", FAKE_JOURNAL=str(journal)) as up:
        up.wait_until_serving(num_processes=4)
        first, second = GRPC.findall(up.output)
        assert int(second.rpartition(":")[2]) == int(first.rpartition(":")[2]) + 1 > 1
        assert f"octavo chat --target {first},{second}" in up.output
        with Client([first, second]) as client:
            assert client.chat("Capital of France?").text == "Paris, of course"
            # It is not started again meanwhile.
            up.process.send_signal(signal.SIGSTOP)
            up.child("router").kill()
            assert client.chat("Capital of France?").text == "Paris, of course"
            up.process.send_signal(signal.SIGCONT)
        up.wait_for("router 0 was killed by SIGKILL; starting it again")
        up.wait_for("router 0 max_num_seqs=", count=2)
        up.interrupt()
        assert up.wait() == 0
    assert journal.read_text().split() == ["router", "router", "scheduler", "worker"]
