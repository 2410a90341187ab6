"""Builds the messages of a beam search: the parameters of each step, and how an output ended."""

from collections.abc import Collection

from protos import inference_pb2 as pb
from protos.scheduler_pb2 import SequenceFinish
from router.search.beams import Beam, BeamSearch


def end_ids(sampling: pb.SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """Returns the tokens that end an output. sampling: resolved."""
    return frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)))


def new_search(asked: pb.BeamSearch, sampling: pb.SamplingParams, eos_token_ids: Collection[int]) -> BeamSearch:
    """asked, sampling: resolved."""
    return BeamSearch(
        width=asked.width,
        length_penalty=asked.length_penalty,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        end_ids=end_ids(sampling, eos_token_ids),
        num_logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
    )


def step_sampling(search: BeamSearch, seed: int) -> pb.SamplingParams:
    """One token for each beam. Only the logprobs beside it count, not the token that is drawn."""
    return pb.SamplingParams(
        temperature=0,
        top_p=1,
        top_k=0,
        min_p=0,
        repetition_penalty=1,
        seed=seed,
        n=max(len(search.live), 1),
        max_tokens=search.num_steps + 1,
        ignore_eos=True,
        logprobs=search.num_asked,
        skip_special_tokens=True,
    )


def finish(beam: Beam, sampling: pb.SamplingParams, ends: Collection[int], num_cached_tokens: int) -> SequenceFinish:
    """Returns how an output ended. ends: the tokens that end one. num_cached_tokens: of the prompt."""
    ended = SequenceFinish(reason=pb.FINISH_REASON_LENGTH, num_cached_tokens=num_cached_tokens)
    last = beam.token_ids[-1]
    if last in ends:
        ended.reason = pb.FINISH_REASON_STOP
        if last in sampling.stop_token_ids:
            ended.stop_token_id = last
    return ended
