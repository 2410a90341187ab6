"""The cluster's state as the console's page takes it: plain JSON, a second's worth at a time."""

import base64
import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from protos import admin_pb2 as pb
from runtime.telemetry.rates import ClusterRates, ReplicaRates


def state_json(view: pb.ObserveResponse, rates: ClusterRates, images: dict[str, Any], *, is_admin: bool) -> bytes:
    """Numbers are seconds, tokens and tokens a second, as in protos/admin.proto. images: router.api.console.images."""
    router = view.router
    shown: dict[str, Any] = {
        "is_admin": is_admin,
        "router": {
            "id": router.router_id,
            "version": router.version,
            "model": router.model,
            "uptime": router.uptime,
            "num_streams": router.num_streams,
            "num_parked_streams": router.num_parked_streams,
            "num_resubmissions": router.num_resubmissions,
            "images": images,
        },
        "rates": {name: value for name, value in dataclasses.asdict(rates).items() if name != "replicas"},
        "replicas": [_replica(each, of) for each, of in zip(view.replicas, rates.replicas, strict=True)],
        "requests": _all_fields(view.requests),
        "num_requests": view.num_requests,
    }
    return msgspec.json.encode(shown)


def _replica(view: pb.ReplicaView, rates: ReplicaRates) -> dict[str, Any]:
    return {
        **_fields(view, without=("used_blocks", "cached_blocks", "totals", "ranks", "steps", "sequences")),
        "used_blocks": base64.b64encode(view.used_blocks).decode(),
        "cached_blocks": base64.b64encode(view.cached_blocks).decode(),
        "num_preemptions": view.totals.num_preemptions,
        "rates": dataclasses.asdict(rates),
        "ranks": _all_fields(view.ranks),
        # Decode, draft and prefill tokens: there are a hundred steps in each message.
        "steps": [(each.num_decode_tokens, each.num_draft_tokens, each.num_prefill_tokens) for each in view.steps],
    }


def explanation_json(answer: pb.ExplainResponse) -> str:
    shown = {
        "timelines": [
            _fields(each, without=("entries",)) | {"entries": _all_fields(each.entries)} for each in answer.timelines
        ],
        "unreachable": list(answer.unreachable),
    }
    return msgspec.json.encode(shown).decode()


def _fields(message: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns all fields, defaults included, of a message of plain values."""
    names = (field.name for field in message.DESCRIPTOR.fields)
    return {name: getattr(message, name) for name in names if name not in without}


def _all_fields(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The same for messages of one kind."""
    names = [field.name for field in messages[0].DESCRIPTOR.fields] if messages else []
    return [{name: getattr(message, name) for name in names} for message in messages]
