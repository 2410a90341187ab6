"""What a client that resumes brings, folded again."""

from collections.abc import Sequence

from protos import inference_pb2 as pb
from router.choices import Choice
from router.errors import InvalidRequest


def refold(choices: Sequence[Choice], resume: pb.Resume, sampling: pb.SamplingParams) -> list[pb.Chunk]:
    """Folds the tokens that the client holds into its choices; returns what it lacks of their text and ends.

    choices: new ones, by index. sampling: as they were made with. Raises InvalidRequest if the resume contradicts
    itself.
    """
    chunks: list[pb.Chunk] = []
    for brought in resume.choices:
        choice = choices[brought.index]
        text = choice.refold(brought.output_token_ids, sampling).encode()
        if brought.finished:
            choice.finish = choice.finish or pb.Finish(reason=pb.FINISH_REASON_STOP)
            continue
        delivered = brought.text_bytes_delivered
        field = f"resume.choices of index {brought.index}: text_bytes_delivered={delivered}"
        if delivered > len(text):
            raise InvalidRequest(
                f"{field}, but its {len(brought.output_token_ids)} tokens give {len(text)} bytes of text"
            )
        try:
            rest = text[delivered:].decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"{field} is inside of a character: count whole ones, in UTF-8") from None
        if rest or choice.finish is not None:
            chunks.append(
                pb.Chunk(index=brought.index, first_token=len(choice.token_ids), text=rest, finish=choice.finish)
            )
    return chunks
