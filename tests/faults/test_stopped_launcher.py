"""`octavo up` is stopped in mid-stream, as by Ctrl-Z or a dead terminal: nothing reads the logs of its processes, and
they go on serving.

Before: the router stood still once the pipe was full, and the stream passed its deadline.
"""

import signal
from pathlib import Path

import pytest

from octavo import Client, InvalidRequest, SamplingParams
from tests.support.up import Up

# Found first by `python -m worker` in its folder: a worker without weights, with 20 ms a step.
WORKER = """
import sys
del sys.path[0]
from tests.fakes.worker import main
sys.exit(main([*sys.argv[1:], "--step-seconds=0.02", "--vocab-size=49152", "--max-len=2048"]))
"""
# Each leaves a line of some 350 bytes in the router's log; a pipe holds 64 KiB.
NUM_REFUSED = 400
SAMPLING = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)


def test_streams_go_on_while_nothing_reads_the_logs(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    with Up(
        tmp_path,
        "--data-parallel-size=1",
        "--served-model-name=it",
        "--log-level=debug",
        "--enable-log-requests",
        real=True,
    ) as up:
        up.wait_for("serving; Ctrl-C to stop")
        with Client(f"localhost:{up.port}", timeout=20) as client:
            expected = client.generate("Once upon a time", SAMPLING)
            with client.stream("Once upon a time", SAMPLING) as stream:
                next(stream)
                up.process.send_signal(signal.SIGSTOP)
                for number in range(NUM_REFUSED):
                    with pytest.raises(InvalidRequest):
                        client.generate("x", SamplingParams(temperature=-1), request_id=f"{number:0>128}")
                for _ in stream:
                    pass
            assert stream.generation.text == expected.text
            up.process.send_signal(signal.SIGCONT)
        # The lines come out once they are read, in order.
        up.wait_for(f"request_id={NUM_REFUSED - 1:0>128}")
        ids = [line.split("request_id=")[1][:128] for line in up.lines if "outcome=invalid_argument" in line]
        assert ids == [f"{number:0>128}" for number in range(NUM_REFUSED)]
