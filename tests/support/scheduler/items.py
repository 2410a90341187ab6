"""Items of prompts, as routers send them to schedulers."""

from protos import inference_pb2
from runtime.media.names import item_name, serialized

Item = tuple[inference_pb2.ItemSpan, bytes]


def item(content: bytes, first_token: int, num_tokens: int = 12) -> Item:
    """A span and the item's data."""
    data = serialized(inference_pb2.ItemData(kind=inference_pb2.ITEM_KIND_IMAGE, files=[content]))
    span = inference_pb2.ItemSpan(
        name=item_name(data),
        kind=inference_pb2.ITEM_KIND_IMAGE,
        first_token=first_token,
        num_tokens=num_tokens,
        num_embeddings=num_tokens,
        grid=[1, 3, num_tokens // 3],
    )
    return span, data


def prompt_with(text: int, *spans: inference_pb2.ItemSpan, length: int = 40) -> list[int]:
    prompt = list(range(text, text + length))
    for span in spans:
        prompt[span.first_token : span.first_token + span.num_tokens] = [30] * span.num_tokens
    return prompt
