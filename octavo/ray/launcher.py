"""Runs `octavo up --on ray`: starts, follows and stops a cluster on the nodes of a Ray cluster."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.options import Options
from octavo.cluster.display import Display
from octavo.cluster.launcher import Launcher
from octavo.cluster.ports import resolve_ports
from octavo.cluster.processes import cluster_processes
from octavo.ray.actors import RayActors
from octavo.ray.fleet import RayFleet, check
from octavo.ray.library import connect, import_ray
from octavo.ray.placement import needs_of, plan_placement
from runtime.security.curve import make_keys


def run_cluster_on_ray(options: Options, *, console: Console, first_prompt: str = "", verbose: bool = False) -> int:
    """As octavo.cluster.launcher.run_cluster, but only the router runs on this node; Ray places the rest."""
    check(options)
    ray = import_ray()
    # Processes on other nodes run in other directories, so the path has to be absolute.
    if Path(options.model).exists():
        options = options.model_copy(update={"model": str(Path(options.model).absolute())})
    options = resolve_ports(options)
    replica = needs_of(options, has_gpus=False).replica
    connect(ray, num_cpus=1 + options.data_parallel_size * int(replica["CPU"]))
    try:
        return asyncio.run(_serve(ray, options, console, first_prompt, verbose))
    finally:
        ray.shutdown()


async def _serve(ray: Any, options: Options, console: Console, first_prompt: str, verbose: bool) -> int:
    needs = needs_of(options, has_gpus=ray.cluster_resources().get("GPU", 0) > 0)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    plan = plan_placement(needs, options.data_parallel_size, nodes)
    specs = cluster_processes(options, Path("options.yaml"), num_cores=len(nodes))
    display = Display(specs, console, verbose=verbose)
    fleet = RayFleet(options, RayActors(ray), plan, needs, _make_keys(), display, specs)
    return await Launcher(options, console, first_prompt, display, fleet).run()


def _make_keys() -> dict[str, str]:
    """Makes keys for this cluster only: name -> text."""
    with tempfile.TemporaryDirectory(prefix="octavo-keys-") as directory:
        keys = Path(directory) / "keys"
        make_keys(keys)
        return {str(path.relative_to(keys)): path.read_text() for path in keys.rglob("*") if path.is_file()}
