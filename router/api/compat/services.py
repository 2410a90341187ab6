"""Registers the services that the option `compat` names."""

from collections.abc import Callable, Sequence

import grpc.aio

from router.api.compat.kserve.service import add_to_server as add_kserve
from router.intake.intake import Intake
from router.replicas.replica_set import ReplicaSet


class MissingPackageError(ImportError):
    """A service's messages are in a package that is not installed; the message says which."""


def add_services(names: Sequence[str], server: grpc.aio.Server, intake: Intake, replicas: ReplicaSet) -> list[str]:
    """Registers the services `names` and returns their full names. Raises MissingPackageError."""
    return [_ADD[name](server, intake, replicas) for name in dict.fromkeys(names)]


def _add_vllm(server: grpc.aio.Server, intake: Intake, replicas: ReplicaSet) -> str:
    try:
        # Imported here, so that the other services need not have the package.
        from router.api.compat.vllm_engine.service import add_to_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "smg_grpc_proto":
            raise
        raise MissingPackageError(
            "compat: vllm needs the Python package smg-grpc-proto: install octavo[smg], or leave vllm out"
        ) from None
    return add_to_server(server, intake, replicas)


_ADD: dict[str, Callable[[grpc.aio.Server, Intake, ReplicaSet], str]] = {"vllm": _add_vllm, "kserve": add_kserve}
