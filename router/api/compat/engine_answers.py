"""What the services of SMG's engines answer alike, in fields of the same names."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import grpc.aio

from configs.sampling import FROM_MODEL
from protos import inference_pb2 as pb
from router.intake.intake import Intake
from router.replicas.replica_set import ReplicaSet
from router.streams.outbox import bounded_reading
from router.streams.stream import Stream


def model_fields(intake: Intake) -> dict[str, Any]:
    """Fields of a GetModelInfoResponse. Raises NoReplica before the first replica has said what it serves."""
    model = intake.model
    # From generation_config.json: the caller fills them into requests that leave them unset.
    defaults = {
        parameter.name: getattr(model.default_sampling, parameter.name)
        for parameter in FROM_MODEL
        if parameter.given_in(model.default_sampling)
    }
    return {
        "model_path": model.name,
        "tokenizer_path": model.name,
        "served_model_name": model.name,
        "is_generation": True,
        "model_type": model.architecture,
        "architectures": [model.architecture],
        "vocab_size": model.vocab_size,
        "max_context_length": model.max_model_len,
        "max_req_input_len": model.max_model_len - 1,
        "eos_token_ids": model.eos_token_ids,
        "default_sampling_params_json": json.dumps(defaults) if defaults else "",
    }


def health_fields(intake: Intake, replicas: ReplicaSet) -> dict[str, Any]:
    """Fields of a HealthCheckResponse."""
    message = "draining" if intake.draining else replicas.describe()
    return {"healthy": replicas.num_ready > 0 and not intake.draining, "message": message}


async def write_replies(
    stream: Stream,
    replies_to: Callable[[pb.GenerateResponse], Iterable[Any]],
    context: grpc.aio.ServicerContext,
) -> None:
    """Writes what becomes of a stream's events, until it ends."""
    with bounded_reading(stream.outbox):
        while events := await stream.outbox.take():
            for event in events:
                for reply in replies_to(event):
                    await context.write(reply)
