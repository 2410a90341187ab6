"""The subset of `kustomize build` that deploy/kubernetes uses: the tool itself is not a Python package.

Supported: resources, components, patches (strategic merges, by path), configMapGenerator (files; names get no hash),
namespace. Anything else in a kustomization.yaml is an error, as are missing files and missing targets of patches.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

_KNOWN = {"apiVersion", "kind", "resources", "components", "patches", "configMapGenerator", "namespace"}
_WITHOUT_NAMESPACE = {"Namespace"}
# Lists that are merged by a field of their members (patchMergeKey in Kubernetes' API); all other lists are replaced as
# a whole. Each of these names has the same key wherever it stands in a pod.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}


class KustomizeError(ValueError):
    """A folder that `kustomize build` would refuse."""


def build(folder: Path) -> list[Object]:
    """All objects of a folder with a kustomization.yaml."""
    return _apply(folder, [])


def identity(item: Object) -> tuple[str, str, str]:
    """The fields by which a patch finds its target: apiVersion, kind, name."""
    return item["apiVersion"], item["kind"], item["metadata"]["name"]


def documents(file: Path) -> list[Object]:
    if not file.is_file():
        raise KustomizeError(f"{file}: no such file")
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


def _apply(folder: Path, objects: list[Object]) -> list[Object]:
    """objects: those that a component changes; empty for a kustomization."""
    (kustomization,) = documents(folder / "kustomization.yaml")
    if unknown := set(kustomization) - _KNOWN:
        raise KustomizeError(f"{folder}: kustomization.yaml says {sorted(unknown)}, which is not known here")
    for name in kustomization.get("resources", ()):
        path = (folder / name).resolve()
        objects = objects + (build(path) if path.is_dir() else documents(path))
    for generator in kustomization.get("configMapGenerator", ()):
        objects = _with_config_map(folder, generator, objects)
    for name in kustomization.get("components", ()):
        objects = _apply((folder / name).resolve(), objects)
    for patch in kustomization.get("patches", ()):
        for document in documents(folder / patch["path"]):
            objects = _patched(objects, document, folder / patch["path"])
    if namespace := kustomization.get("namespace"):
        objects = [_in_namespace(item, namespace) for item in objects]
    names = [identity(item) for item in objects]
    if twice := {name for name in names if names.count(name) > 1}:
        raise KustomizeError(f"{folder}: twice: {sorted(twice)}")
    return objects


def _with_config_map(folder: Path, generator: Object, objects: list[Object]) -> list[Object]:
    data = {}
    for name in generator["files"]:
        if not (folder / name).is_file():
            raise KustomizeError(f"{folder / name}: no such file")
        data[Path(name).name] = (folder / name).read_text()
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data}
    others = [item for item in objects if identity(item) != identity(made)]
    replaces = generator.get("behavior", "create") == "replace"
    if replaces != (len(others) < len(objects)):
        raise KustomizeError(f"{folder}: configMapGenerator {generator['name']}: behavior does not fit what is there")
    return [*others, made]


def _patched(objects: list[Object], patch: Object, path: Path) -> list[Object]:
    target = identity(patch)
    if target not in map(identity, objects):
        raise KustomizeError(f"{path}: there is no {target}")
    if patch.get("$patch") == "delete":
        return [item for item in objects if identity(item) != target]
    return [_merged(item, patch) if identity(item) == target else item for item in objects]


def _merged(value: Object, patch: Object) -> Object:
    merged = deepcopy(value)
    for name, change in patch.items():
        there = merged.get(name)
        if change is None:
            merged.pop(name, None)
        elif isinstance(change, dict) and isinstance(there, dict):
            merged[name] = _merged(there, change)
        elif isinstance(change, list) and isinstance(there, list) and name in _MERGE_KEYS:
            merged[name] = _merged_lists(there, change, _MERGE_KEYS[name])
        else:
            merged[name] = deepcopy(change)
    return merged


def _merged_lists(items: list[Object], changes: list[Object], key: str) -> list[Object]:
    merged = {item[key]: item for item in items}
    for change in changes:
        if change.get("$patch") == "delete":
            del merged[change[key]]
        else:
            merged[change[key]] = _merged(merged.get(change[key], {}), change)
    return list(merged.values())


def _in_namespace(item: Object, namespace: str) -> Object:
    if item["kind"] in _WITHOUT_NAMESPACE:
        return item
    return item | {"metadata": item["metadata"] | {"namespace": namespace}}
