"""What a replica is sent of a request: its prompt follows in router.session."""

import time
from collections.abc import Iterable

from protos import scheduler_pb2 as wire
from router.choices import Choice
from router.request import Request
from router.sampling import for_scheduler

# A scheduler knows a request's attempt as the client's attempt, then 16 bits that count the router's own resubmissions:
# so a client's next attempt is above whatever its router has made of the last one.
_RESUBMISSION_BITS = 16
MOST_RESUBMISSIONS = (1 << _RESUBMISSION_BITS) - 1


def submission(
    request: Request,
    choices: Iterable[Choice],
    *,
    replica_id: str,
    num_resubmissions: int,
    wants_prompt_logprobs: bool,
) -> wire.Submit:
    """Of the unfinished choices, with their tokens so far. replica_id: as its Welcome has it."""
    sampling = for_scheduler(request.sampling)
    if not wants_prompt_logprobs:
        sampling.ClearField("prompt_logprobs")
    submit = wire.Submit(
        request_id=request.scoped_id,
        attempt=(request.attempt << _RESUBMISSION_BITS) + num_resubmissions,
        sampling=sampling,
        choices=[
            wire.SequenceStart(choice=choice.index, output_token_ids=choice.token_ids)
            for choice in choices
            if choice.finish is None
        ],
        priority=request.priority,
        cache_salt=request.cache_salt,
        traceparent=request.trace.submitted(replica_id, num_resubmissions),
    )
    if request.deadline is not None:
        # 0 would mean none.
        submit.timeout = max(request.deadline - time.monotonic(), 0.001)
    return submit
