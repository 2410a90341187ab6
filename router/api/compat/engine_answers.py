"""What the services of SMG's engines answer alike, in fields of the same names."""

import datetime
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
from runtime.wire import octavo_version


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


def load_fields(intake: Intake, replicas: ReplicaSet) -> dict[str, Any]:
    """Fields of a SchedulerLoad: the sum of all replicas. Blocks that can be taken at once count as unused."""
    sessions = [replica.session for replica in replicas.replicas if replica.session is not None]
    loads, block_size = [session.load for session in sessions], intake.model.block_size
    num_blocks = sum(load.num_blocks for load in loads)
    num_used = num_blocks - sum(load.num_free_blocks for load in loads)
    num_running, num_waiting = sum(load.num_running for load in loads), sum(load.num_waiting for load in loads)
    most_running = sum(session.welcome.max_num_seqs for session in sessions)
    return {
        "num_running_reqs": num_running,
        "num_waiting_reqs": num_waiting,
        "num_total_reqs": num_running + num_waiting,
        "num_used_tokens": num_used * block_size,
        "max_total_num_tokens": num_blocks * block_size,
        "token_usage": num_used / num_blocks if num_blocks else 0.0,
        "utilization": num_running / most_running if most_running else 0.0,
        "max_running_requests": most_running,
        "num_waiting_uncached_tokens": sum(load.num_queued_tokens for load in loads),
    }


def loads_fields(load: Any, dp_rank: int | None) -> dict[str, Any]:
    """Fields of a GetLoadsResponse. load: the whole cluster's SchedulerLoad; dp_rank: the rank that is asked for, None
    for all; there is rank 0 alone."""
    return {
        "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
        "version": f"octavo-{octavo_version()}",
        "dp_rank_count": 1,
        "loads": [load] if not dp_rank else [],
    }


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
