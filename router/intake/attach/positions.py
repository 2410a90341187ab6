"""Finds what the client of a gRPC stream lacks, from what it says to hold."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from protos import inference_pb2 as pb
from router.accepted import Request
from router.errors import InvalidRequest, NotKept


@dataclass(slots=True)
class _Place:
    """A place in a choice's output, between two chunks."""

    num_tokens: int = 0
    text_bytes: int = 0
    finished: bool = False

    def pass_over(self, chunk: pb.Chunk) -> None:
        self.num_tokens += len(chunk.token_ids)
        self.text_bytes += len(chunk.text.encode())
        self.finished = self.finished or chunk.HasField("finish")

    def is_behind(self, other: "_Place") -> bool:
        return (
            self.num_tokens > other.num_tokens
            or self.text_bytes > other.text_bytes
            or (self.finished and not other.finished)
        )

    def __str__(self) -> str:
        finish = " and the finish" if self.finished else ""
        return f"{self.num_tokens} tokens, {self.text_bytes} bytes of text{finish}"


class Kept:
    """Says where the events begin that a transcript still has, for each choice."""

    def __init__(self, request: Request) -> None:
        """request: the stream's. What a resume brought is not among its events."""
        self._num_choices = request.sampling.n
        self.started = pb.GenerateResponse()
        self._starts = [_Place() for _ in range(self._num_choices)]
        for brought in () if request.resume is None else request.resume.choices:
            self._starts[brought.index] = _Place(
                len(brought.output_token_ids), brought.text_bytes_delivered, brought.finished
            )
        # Prompt logprobs before this position are not kept: they were dropped, or the client of a resume has all.
        has_logprobs = request.resume is not None and request.resume.prompt_logprobs_delivered
        self._logprobs_start = len(request.prompt_token_ids) if has_logprobs else 0

    def take(self, events: list[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
        """Remembers Started, which every reader gets first. Returns the events."""
        if events and events[0].HasField("started"):
            self.started = events[0]
        return events

    def drop(self, event: pb.GenerateResponse) -> None:
        """Notes that an event, the first one, is not kept any longer."""
        if event.HasField("chunk"):
            self._starts[event.chunk.index].pass_over(event.chunk)
        elif event.HasField("prompt_logprobs"):
            self._logprobs_start = _end_of(event.prompt_logprobs)

    def lacking(self, held: pb.AttachRequest, events: Iterable[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
        """Returns Started, and those of `events` that the client lacks. events: all that are kept.

        Raises InvalidRequest for what no client of this stream can hold, and NotKept.
        """
        wanted = self._wanted(held)
        places = list(map(replace, self._starts))
        if held.prompt_logprobs_end < self._logprobs_start:
            raise NotKept(
                f"prompt_logprobs_end={held.prompt_logprobs_end}: prompt logprobs before {self._logprobs_start} are "
                "not kept any more: resume"
            )
        lacking = [self.started]
        num_logprobs = 0
        for event in events:
            if event.HasField("prompt_logprobs"):
                frame, num_logprobs = event.prompt_logprobs, _end_of(event.prompt_logprobs)
                if frame.first_position >= held.prompt_logprobs_end:
                    lacking.append(event)
                elif num_logprobs > held.prompt_logprobs_end:
                    known = held.prompt_logprobs_end - frame.first_position
                    rest = pb.PromptLogprobs(first_position=held.prompt_logprobs_end, logprobs=frame.logprobs[known:])
                    lacking.append(pb.GenerateResponse(prompt_logprobs=rest))
            elif event.HasField("chunk"):
                index = event.chunk.index
                if places[index] == wanted[index]:
                    lacking.append(event)
                else:
                    self._pass_over(index, event.chunk, places[index], wanted[index])
            elif event.HasField("finished"):
                lacking.append(event)
        for index, (place, want) in enumerate(zip(places, wanted, strict=True)):
            if place != want:
                raise InvalidRequest(f"choices of index {index}: {want}, but only {place} have been sent")
        sent_end = max(num_logprobs, self._logprobs_start)
        if held.prompt_logprobs_end > sent_end:
            raise InvalidRequest(
                f"prompt_logprobs_end={held.prompt_logprobs_end}, but only those before {sent_end} have been sent"
            )
        return lacking

    def _wanted(self, held: pb.AttachRequest) -> list[_Place]:
        """Returns the place where each choice goes on. Raises InvalidRequest, NotKept."""
        wanted = [_Place() for _ in range(self._num_choices)]
        seen: set[int] = set()
        for each in held.choices:
            if each.index >= self._num_choices or each.index in seen:
                raise InvalidRequest(
                    f"choices of index {each.index}: name each choice once; this request has {self._num_choices}"
                )
            seen.add(each.index)
            wanted[each.index] = _Place(each.num_tokens, each.text_bytes, each.finished)
        for index, (start, want) in enumerate(zip(self._starts, wanted, strict=True)):
            if start.is_behind(want):
                raise NotKept(
                    f"choices of index {index}: {want}; what follows is not kept any more, only what follows {start} "
                    "is: resume"
                )
        return wanted

    @staticmethod
    def _pass_over(index: int, chunk: pb.Chunk, place: _Place, want: _Place) -> None:
        before = str(place)
        place.pass_over(chunk)
        if place.is_behind(want):
            raise InvalidRequest(
                f"choices of index {index}: {want} is inside of the chunk from {before} to {place}: count whole chunks"
            )


def _end_of(frame: pb.PromptLogprobs) -> int:
    return frame.first_position + len(frame.logprobs)
