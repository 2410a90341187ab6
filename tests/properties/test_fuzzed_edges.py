"""Some hundred malformed messages for each edge that needs no port; benchmarks/fuzz sends 100,000."""

import logging
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from benchmarks.fuzz.edge import fuzz
from benchmarks.fuzz.edges import KINDS, elements
from benchmarks.fuzz.edges.client_grpc import REQUESTS
from benchmarks.fuzz.mutation import malformed
from protos import inference_pb2 as pb

# For each edge: the number of messages, and outcomes that must occur, or the messages are too wild to get far.
EDGES = {
    "inference": (120, {"no message", "invalid_argument", "streamed"}),
    "kserve": (120, {"no message", "invalid_argument", "streamed"}),
    "vllm": (120, {"no message", "invalid_argument", "streamed"}),
    "http": (300, {"400", "200", "404"}),
    "batch-lines": (400, {"computed", "refused by the endpoint", "invalid_json_line", "invalid_body"}),
    "constraints": (60, {"refused", "generated"}),
    "router-http-framing": (200, {"answered"}),
    "items": (200, {"refused", "decoded", "accepted, not decoded"}),
    "session-scheduler": (400, {"Session ended", "SubmitGroup", "RefuseGroup", "CancelGroup"}),
    "session-router": (400, {"taken", "Session ended", "a stream ended"}),
    "step-result": (150, {"taken", "epoch ended"}),
    "step-plan": (200, {"computed", "refused", "out of the chain"}),
    "step-socket": (200, {"heartbeat answered"}),
    "coordination": (80, {"heard", "member: nothing"}),
}


@pytest.fixture(autouse=True)
def _quiet():
    """Silences the logs about each message."""
    level = logging.getLogger("octavo").level
    logging.getLogger("octavo").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("octavo").setLevel(level)


async def test_messages_of_as_many_elements_as_have_room_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elements, "LARGEST_BYTES", 2**18)
    async with KINDS["elements"].opened(tmp_path) as edge:
        outcome = await fuzz(KINDS["elements"], edge, 150, seed=3)
    assert not outcome.failure, f"{outcome.failure}; the message: {outcome.message[:100]!r}"
    assert {"invalid_argument", "answered"} <= set(outcome.became), outcome.became


@pytest.mark.parametrize("name", EDGES)
async def test_malformed_messages_do_no_harm(name: str, tmp_path: Path) -> None:
    num_messages, expected = EDGES[name]
    async with KINDS[name].opened(tmp_path) as edge:
        outcome = await fuzz(KINDS[name], edge, num_messages, seed=3)
    assert not outcome.failure, f"{outcome.failure}; the message: {outcome.message!r}"
    assert expected <= set(outcome.became), outcome.became


def test_the_same_seed_gives_the_same_messages_and_they_are_of_all_kinds() -> None:
    messages = [malformed(REQUESTS, Random(f"1/{i}")) for i in range(200)]
    assert messages == [malformed(REQUESTS, Random(f"1/{i}")) for i in range(200)]
    kinds = Counter(_is_message(message) for message in messages)
    assert kinds[True] > 60
    assert kinds[False] > 30
    assert max(map(len, messages)) < 2**20


def _is_message(data: bytes) -> bool:
    try:
        pb.GenerateRequest.FromString(data)
    except Exception:  # noqa: BLE001 - whatever a runtime of protobuf raises
        return False
    return True
