"""The pods and processes that deploy/kubernetes declares, in a form that tests can query."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from configs.load import load_options
from configs.options import Options
from tests.support.deploy.kustomize import Object, build
from tests.support.repository import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())


@dataclass(frozen=True)
class Pod:
    """owner: the object that creates such pods. role: which kind of pod, if the owner creates several."""

    owner: Object
    template: Object
    role: str = ""

    @property
    def spec(self) -> Object:
        return self.template["spec"]

    @property
    def labels(self) -> dict[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def container(self, name: str) -> Object:
        (found,) = (each for each in self.containers if each["name"] == name)
        return found

    def volume(self, name: str) -> Object:
        (found,) = (each for each in self.spec["volumes"] if each["name"] == name)
        return found

    def mounted(self, container: Object, path: Path) -> tuple[Object, Object]:
        """The mount that a path of a container is on, and its volume."""
        mounts = [each for each in container["volumeMounts"] if path.is_relative_to(each["mountPath"])]
        mount = max(mounts, key=lambda each: len(each["mountPath"]))
        return mount, self.volume(mount["name"])


@cache
def objects(overlay: str) -> list[Object]:
    return build(FOLDER / "overlays" / overlay)


def of_kind(overlay: str, *kinds: str) -> list[Object]:
    return [item for item in objects(overlay) if item["kind"] in kinds]


def named(overlay: str, kind: str, name: str) -> Object:
    (found,) = (item for item in of_kind(overlay, kind) if item["metadata"]["name"] == name)
    return found


def pods(overlay: str) -> Iterator[Pod]:
    """Each kind of pod."""
    for item in objects(overlay):
        if item["kind"] in ("Deployment", "StatefulSet"):
            yield Pod(item, item["spec"]["template"])
        elif item["kind"] == "LeaderWorkerSet":
            templates = item["spec"]["leaderWorkerTemplate"]
            yield Pod(item, templates["leaderTemplate"], "leader")
            yield Pod(item, templates["workerTemplate"], "worker")


def processes(overlay: str) -> Iterator[tuple[Pod, Object]]:
    """Each kind of container, with its pod."""
    for pod in pods(overlay):
        for container in pod.containers:
            yield pod, container


def environment(container: Object) -> dict[str, str]:
    """The environment of the process, in the first non-leader pod of a LeaderWorkerSet, which adds variables."""
    given = {"LWS_LEADER_ADDRESS": "octavo-replica-0.octavo-replica.octavo", "LWS_WORKER_INDEX": "1"}
    for each in container.get("env", []):
        value = each.get("value") or _from_the_pod(each["valueFrom"])
        for name, other in given.items():
            value = value.replace(f"$({name})", other)
        given[each["name"]] = value
    return given


def _from_the_pod(source: Object) -> str:
    assert source == {"fieldRef": {"fieldPath": "status.podIP"}}
    return "10.1.2.3"


def options_of(overlay: str, pod: Pod, container: Object, directory: Path) -> Options:
    """The options as the process resolves them. directory: gets a copy of the file that its volume holds."""
    environ = environment(container)
    path = Path(environ["OCTAVO_CONFIG"])
    mount, volume = pod.mounted(container, path)
    data: dict[str, Any] = named(overlay, "ConfigMap", volume["configMap"]["name"])["data"]
    copy = directory / path.name
    copy.write_text(data[str(path.relative_to(mount["mountPath"]))])
    return load_options(copy, environ=environ)
