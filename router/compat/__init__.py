"""Other projects' gRPC services, on the router's own server and over its own intake.

This is the room's one door: a router imports it, and the services' modules and messages behind it, only for the names
in option `compat`. Each service has a module of its name.
"""

import importlib
import logging
from collections.abc import Sequence

import grpc.aio

from configs.options import Options
from router.errors import MissingPackageError
from router.intake.intake import Intake
from router.replicas.replica_set import ReplicaSet

log = logging.getLogger("octavo.router.compat")


def add_services(
    names: Sequence[str], server: grpc.aio.Server, intake: Intake, replicas: ReplicaSet, options: Options
) -> list[str]:
    """Registers the services `names` and returns their full names. Raises MissingPackageError."""

    def added(name: str) -> list[str]:
        return _module_of(name).add_to_server(server, intake, replicas, options)

    services = [service for name in dict.fromkeys(names) for service in added(name)]
    if "vllm" in names and "smg" not in names:
        # Until the next release, `vllm` includes `smg`.
        try:
            services += added("smg")
        except MissingPackageError:
            pass
        else:
            log.warning("compat: vllm includes VllmEngine, SMG's service, until the next release: name smg for it")
    return services


def _module_of(name: str):
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "smg_grpc_proto":
            raise
        raise MissingPackageError(
            f"compat: {name} needs the Python package smg-grpc-proto: install octavo[smg], or leave {name} out"
        ) from None
