"""Registers the services that the option `compat` names."""

import logging
from collections.abc import Callable, Sequence

import grpc.aio

from configs.options import Options
from router.api.compat.kserve.service import add_to_server as add_kserve
from router.api.compat.sglang.service import add_to_server as add_sglang
from router.api.compat.vllm.service import add_to_server as add_vllm
from router.intake.intake import Intake
from router.replicas.replica_set import ReplicaSet

log = logging.getLogger("octavo.router.compat")


class MissingPackageError(ImportError):
    """A service's messages are in a package that is not installed; the message says which."""


def add_services(
    names: Sequence[str], server: grpc.aio.Server, intake: Intake, replicas: ReplicaSet, options: Options
) -> list[str]:
    """Registers the services `names` and returns their full names. Raises MissingPackageError."""
    added = [_ADD[name](server, intake, replicas, options) for name in dict.fromkeys(names)]
    if "vllm" in names and "smg" not in names:
        # What `vllm` meant before.
        try:
            added.append(_add_smg(server, intake, replicas, options))
        except MissingPackageError:
            pass
        else:
            log.warning("compat: vllm includes VllmEngine, SMG's service, until the next release: name smg for it")
    return [service for services in added for service in services]


def _add_smg(server: grpc.aio.Server, intake: Intake, replicas: ReplicaSet, options: Options) -> list[str]:
    try:
        # Imported here, so that the other services need not have the package.
        from router.api.compat.vllm_engine.service import add_to_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "smg_grpc_proto":
            raise
        raise MissingPackageError(
            "compat: smg needs the Python package smg-grpc-proto: install octavo[smg], or leave smg out"
        ) from None
    return [add_to_server(server, intake, replicas, options)]


def _add_kserve(server: grpc.aio.Server, intake: Intake, replicas: ReplicaSet, options: Options) -> list[str]:
    return [add_kserve(server, intake, replicas)]


def _add_sglang(server: grpc.aio.Server, intake: Intake, replicas: ReplicaSet, options: Options) -> list[str]:
    return [add_sglang(server, intake, replicas)]


_ADD: dict[str, Callable[[grpc.aio.Server, Intake, ReplicaSet, Options], list[str]]] = {
    "vllm": add_vllm,
    "smg": _add_smg,
    "sglang": _add_sglang,
    "kserve": _add_kserve,
}
