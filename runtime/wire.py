"""Facts that both ends of a wire agree on besides its messages: versions, bounds, digests and identities."""

import hashlib
from functools import cache


@cache
def octavo_version() -> str:
    """The installed version, such as "0.1.0"."""
    # Imported late: it takes 48 ms, which clients need not pay.
    from importlib.metadata import version

    return version("octavo")


# Version 2 has SamplingParams.top_n_sigma, which a worker of version 1 would ignore.
PROTOCOL_VERSION = 2

# Batches of KV events that may wait in a scheduler, and messages for one subscriber: vLLM's defaults.
KV_EVENTS_WAITING = 100_000

# Bounds of one message, in bytes.
SESSION_MESSAGE_BYTES = 2**20
STEP_MESSAGE_BYTES = 64 * 2**20
COORDINATION_MESSAGE_BYTES = 64 * 2**10
# Token ids in one Submit or PromptPart: at most 5 bytes each as varints, with room to spare in SESSION_MESSAGE_BYTES.
SESSION_PART_TOKENS = 100_000
# Submit.attempt is the client's attempt, then so many bits that count the router's resubmissions: a client's next
# attempt is above every resubmission of the last one.
RESUBMISSION_BITS = 16
PROMPT_LOGPROBS_FRAME_BYTES = 256 * 2**10
# Drafts that a worker proposes for a sequence because its constraint leaves no other tokens.
MAX_FORCED_TOKENS = 16


def plan_digest(payload: bytes) -> bytes:
    """The digest of a plan, 16 bytes, for StepPlan.previous_digest of the next plan.

    payload: the ZeroMQ frame that carried the plan, a serialized SchedulerToWorker.
    """
    return hashlib.blake2b(payload, digest_size=16).digest()


def rank_identity(epoch: int, rank: int) -> bytes:
    """ZeroMQ identity of a rank within an epoch."""
    return f"{epoch}:{rank}".encode()


def replica_identity(replica: int, instance: int) -> bytes:
    """ZeroMQ identity of a replica's scheduler at the coordinator. instance: the number of its process."""
    return f"{replica}:{instance}".encode()


def coordination_endpoint(step_address: str) -> str:
    """The coordinator's endpoint for replica 0's step endpoint: PATH.lockstep for ipc, the port after that of
    heartbeats for tcp."""
    if step_address.startswith("tcp://"):
        host, _, port = step_address.rpartition(":")
        return f"{host}:{int(port) + 2}"
    return step_address + ".lockstep"


def heartbeat_endpoint(step_address: str) -> str:
    """The endpoint of heartbeats for a step endpoint: PATH.heartbeat for ipc, the next port for tcp."""
    if step_address.startswith("tcp://"):
        host, _, port = step_address.rpartition(":")
        return f"{host}:{int(port) + 1}"
    return step_address + ".heartbeat"
