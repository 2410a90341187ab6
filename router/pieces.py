"""What a choice has for its client, before it is a message."""

from collections.abc import Sequence

from protos.inference_pb2 import Finish, GenerateResponse, TokenLogprobs


class Piece:
    """The contents of a Chunk. It grows until it is sent, which costs less in lists than in messages."""

    __slots__ = ("exact", "finish", "first_token", "index", "logprobs", "size", "text", "token_ids")

    def __init__(
        self,
        index: int,
        first_token: int,
        token_ids: list[int],
        text: str,
        logprobs: Sequence[TokenLogprobs] = (),
        finish: Finish | None = None,
    ) -> None:
        """As the fields of Chunk. logprobs are copied."""
        self.index = index
        self.first_token = first_token
        self.token_ids = token_ids
        self.text = text
        self.logprobs: list[TokenLogprobs] = []
        self.finish = finish
        self.exact = True
        # Of its message, in bytes, to a few bytes.
        self.size = 10 + 3 * len(token_ids) + (len(text) if text.isascii() else len(text.encode()))
        for entry in logprobs:
            copied = TokenLogprobs()
            copied.CopyFrom(entry)
            self.logprobs.append(copied)
            self.size += entry.ByteSize()

    def join(self, later: "Piece") -> None:
        """Takes in the one that follows it, of the same choice and equally exact."""
        self.token_ids += later.token_ids
        self.text += later.text
        self.logprobs += later.logprobs
        self.finish = later.finish
        self.size += later.size

    def message(self) -> GenerateResponse:
        # Filled in place: a Chunk given to the constructor would be copied.
        message = GenerateResponse()
        chunk = message.chunk
        if self.index:
            chunk.index = self.index
        chunk.first_token = self.first_token
        chunk.token_ids.extend(self.token_ids)
        chunk.text = self.text
        chunk.exact = self.exact
        if self.logprobs:
            chunk.logprobs.extend(self.logprobs)
        if self.finish is not None:
            chunk.finish.CopyFrom(self.finish)
        return message
