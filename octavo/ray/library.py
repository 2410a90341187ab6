"""Imports Ray, an optional dependency, and connects to it."""

import importlib
import os
from typing import Any

from octavo.cluster.errors import ClusterError

# For a Ray that is started here: Octavo puts only a few strings into its object store.
_OBJECT_STORE_BYTES = 80 * 2**20


def import_ray() -> Any:
    """Imports Ray's module. Raises ClusterError if it is not installed, or does not work here."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ClusterError(
            f"`octavo up --on ray` needs Ray on each node ({error}): pip install 'octavo[ray]', or 'ray>=2.50,<3'"
        ) from None


def connect(ray: Any, *, num_cpus: int) -> None:
    """Joins the Ray cluster that RAY_ADDRESS names, or that this machine is part of; otherwise starts one on this
    machine alone.

    num_cpus: what a cluster started here offers at least, even on a machine with fewer. Raises ClusterError.
    """
    settings = {"log_to_driver": False, "logging_level": "warning", "namespace": "octavo"}
    try:
        ray.init(address="auto", **settings)
        return
    except ConnectionError as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise ClusterError(
                f"RAY_ADDRESS={address}: no Ray cluster is there ({error}); run `ray start --address={address}` here, "
                f"or unset it to start a Ray cluster of this machine alone"
            ) from None
    # By default, Ray reports usage statistics to its makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=max(num_cpus, os.cpu_count() or 1),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        **settings,
    )
