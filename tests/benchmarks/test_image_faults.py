"""The streams with images of benchmarks.faults."""

from collections import Counter

from benchmarks.faults.traffics.images import make_image_plans
from octavo.client.requests import generate_request
from protos.inference_pb2 import GenerateRequest


def _files(request: GenerateRequest) -> list[bytes]:
    parts = [part.item for message in request.chat.messages for part in message.parts if part.HasField("item")]
    return [item.image.data for item in (*request.items, *parts)]


def test_streams_share_some_images_and_come_again_with_their_seed() -> None:
    plans = make_image_plans(40, 1, mean_tokens=20)
    requests = [generate_request(plan.prompt, plan.sampling, plan.options) for plan in plans]
    counts = [len(_files(request)) for request in requests]
    assert set(counts) == {1, 2, 3}
    assert all(plan.kind.startswith(f"{count} image") for plan, count in zip(plans, counts, strict=True))
    assert all(request.prompt.count("<image>") in (0, count) for request, count in zip(requests, counts, strict=True))
    # A file counts once a stream.
    uses = Counter(file for request in requests for file in set(_files(request)))
    assert sum(uses[file] > 1 for file in uses) == 6
    assert sum(count == 1 for count in uses.values()) > 20
    assert sum(plan.sampling.temperature != 0 for plan in plans) == 20
    again = make_image_plans(40, 1, mean_tokens=20)
    assert [plan.prompt for plan in again] == [plan.prompt for plan in plans]
    assert [plan.prompt for plan in make_image_plans(40, 2, mean_tokens=20)] != [plan.prompt for plan in plans]
