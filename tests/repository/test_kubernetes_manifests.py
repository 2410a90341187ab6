"""deploy/kubernetes is valid for Kubernetes, and consistent with itself, the Dockerfile and the options."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from configs.flags import parse_flags
from runtime.wire import heartbeat_endpoint
from tests.support.deploy import kustomize
from tests.support.deploy.kustomize import KustomizeError, Object, build
from tests.support.deploy.manifests import (
    FOLDER,
    OVERLAYS,
    Pod,
    environment,
    named,
    objects,
    of_kind,
    options_of,
    pods,
    processes,
)
from tests.support.repository import ROOT

# The oldest version with sidecars, and the newest whose schemas are known.
VERSIONS = ("1.29", "1.37")
CUSTOM = {"PodMonitor": "podmonitor-v1.json", "LeaderWorkerSet": "leaderworkerset-v1.json"}

overlays = pytest.mark.parametrize("overlay", OVERLAYS)


def pods_matching(overlay: str, labels: dict[str, str]) -> list[Pod]:
    return [pod for pod in pods(overlay) if labels.items() <= pod.labels.items()]


def container_ports(pod: Pod) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for each in pod.containers for port in each.get("ports", [])}


def ports_of(container: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def probes(container: Object) -> dict[str, Object]:
    return {name: container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe") if name in container}


@overlays
@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_what_kubernetes_allows(overlay: str, version: str):
    for item in objects(overlay):
        if item["kind"] not in CUSTOM:
            kubernetes_validate.validate(item, version, strict=True)
    for pod in pods(overlay):
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": pod.template}
        kubernetes_validate.validate(template, version, strict=True)


@overlays
def test_custom_resources_are_what_their_definitions_allow(overlay: str):
    for item in of_kind(overlay, *CUSTOM):
        schema = json.loads((ROOT / "tests/support/crds" / CUSTOM[item["kind"]]).read_text())
        jsonschema.validate(item, schema)


def test_every_file_belongs_to_an_overlay():
    # A file that no kustomization names is forgotten or useless.
    named_somewhere = set()
    for path in FOLDER.rglob("kustomization.yaml"):
        (content,) = kustomize.documents(path)
        names = [*content.get("resources", []), *(patch["path"] for patch in content.get("patches", []))]
        names += [name for generator in content.get("configMapGenerator", []) for name in generator["files"]]
        named_somewhere |= {(path.parent / name).resolve() for name in names} | {path}
    assert not set(FOLDER.rglob("*.yaml")) - named_somewhere


@overlays
def test_selectors_find_the_pods_that_they_are_for(overlay: str):
    for pod in pods(overlay):
        if "selector" in pod.owner["spec"]:
            assert pods_matching(overlay, pod.owner["spec"]["selector"]["matchLabels"]) == [pod]
    for item in of_kind(overlay, "PodDisruptionBudget", "PodMonitor"):
        assert pods_matching(overlay, item["spec"]["selector"]["matchLabels"]), item["metadata"]["name"]
    for policy in of_kind(overlay, "NetworkPolicy"):
        assert pods_matching(overlay, policy["spec"]["podSelector"]["matchLabels"]), policy["metadata"]["name"]


@overlays
def test_services_and_monitors_name_ports_that_pods_have(overlay: str):
    for service in of_kind(overlay, "Service"):
        (pod,) = pods_matching(overlay, service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            assert container_ports(pod)[port["targetPort"]] == port["port"]
    for monitor in of_kind(overlay, "PodMonitor"):
        wanted = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        selected = pods_matching(overlay, monitor["spec"]["selector"]["matchLabels"])
        all_metrics = {name for pod in selected for name in container_ports(pod) if name.startswith("metrics")}
        assert wanted == all_metrics


@overlays
def test_each_policy_opens_ports_that_are_listened_on(overlay: str):
    for policy in of_kind(overlay, "NetworkPolicy"):
        selected = pods_matching(overlay, policy["spec"]["podSelector"]["matchLabels"])
        listened = {port for pod in selected for port in container_ports(pod).values()}
        for rule in policy["spec"]["ingress"]:
            for port in rule.get("ports", []):
                assert set(range(port["port"], port.get("endPort", port["port"]) + 1)) <= listened


@overlays
def test_the_autoscaler_alone_says_how_many_routers_there_are(overlay: str):
    (autoscaler,) = of_kind(overlay, "HorizontalPodAutoscaler")
    target = autoscaler["spec"]["scaleTargetRef"]
    deployment = named(overlay, target["kind"], target["name"])
    assert target["apiVersion"] == deployment["apiVersion"]
    # Otherwise each `kubectl apply` would undo the autoscaler's decision.
    assert "replicas" not in deployment["spec"]
    # A CPU utilization target has a meaning only if the pods request CPU.
    (pod,) = pods_matching(overlay, deployment["spec"]["selector"]["matchLabels"])
    assert all("cpu" in container["resources"]["requests"] for container in pod.containers)


@overlays
def test_options_exist_and_are_valid_and_processes_listen_where_others_look(overlay: str, tmp_path: Path):
    for pod, container in processes(overlay):
        kind, ports = container["name"], ports_of(container)
        options = options_of(overlay, pod, container, tmp_path)
        assert options.metrics_host == "0.0.0.0"
        if kind == "router":
            assert container["args"] == ["python", "-m", "router"]
            assert (options.host, options.port) == ("0.0.0.0", ports["grpc"])
            assert options.process_metrics_port("router") == ports["metrics"]
            continue
        assert options.data_parallel_size == 1
        if kind == "scheduler":
            assert container["args"] == ["python", "-m", "scheduler", "--replica", "0"]
            assert options.scheduler_address(0) == f"0.0.0.0:{ports['grpc']}"
            assert options.process_metrics_port("scheduler") == ports["metrics"]
        elif pod.role != "worker":
            assert container["args"] == ["python", "-m", "worker", "--replica", "0", "--rank", "0"]
            assert options.process_metrics_port("worker") == ports["metrics-worker"]


@pytest.mark.parametrize("index", [1, 3])
def test_each_further_rank_has_its_number_and_the_same_port_for_probes(index: int, tmp_path: Path):
    ((pod, container),) = ((pod, each) for pod, each in processes("hosts") if pod.role == "worker")
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    environ = environment(container) | {"LWS_WORKER_INDEX": str(index), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    said = subprocess.run(container["args"], env=environ, capture_output=True, text=True, check=True, timeout=30).stdout
    module, *arguments = said.split()[1:]
    assert module == "worker"
    _, flags, own = parse_flags(arguments, ("replica", "rank"))
    assert own == {"replica": "0", "rank": str(index)}
    options = options_of("hosts", pod, container, tmp_path).model_copy(
        update={"metrics_port": int(str(flags["metrics_port"]))}
    )
    assert options.process_metrics_port("worker", rank=index) == ports_of(container)["metrics-worker"]


def test_a_group_has_a_pod_for_each_rank_and_all_of_them_the_schedulers_endpoint(tmp_path: Path):
    (replicas,) = of_kind("hosts", "LeaderWorkerSet")
    # A LeaderWorkerSet makes a headless Service of its own name, by which its leaders are found.
    assert not [
        item for item in of_kind("hosts", "Service") if item["metadata"]["name"] == replicas["metadata"]["name"]
    ]
    # A pod that dies is started again alone: the others keep their weights.
    assert replicas["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "None"
    hosts = {"scheduler": "0.0.0.0", "leader": "127.0.0.1", "worker": "octavo-replica-0.octavo-replica.octavo"}
    for pod, container in processes("hosts"):
        if container["name"] != "router":
            options = options_of("hosts", pod, container, tmp_path)
            assert options.world_size == replicas["spec"]["leaderWorkerTemplate"]["size"]
            host = hosts[container["name"] if container["name"] == "scheduler" else pod.role]
            assert options.step_address(0) == f"tcp://{host}:5555"
            if container["name"] == "scheduler":
                assert heartbeat_endpoint(options.step_address(0)).endswith(f":{ports_of(container)['heartbeats']}")


@overlays
def test_routers_know_the_scheduler_of_each_replica_by_its_name(overlay: str, tmp_path: Path):
    (router,) = (pod for pod in pods(overlay) if pod.owner["kind"] == "Deployment")
    (replicas,) = {id(pod.owner): pod.owner for pod in pods(overlay) if pod.owner["kind"] != "Deployment"}.values()
    options = options_of(overlay, router, router.container("router"), tmp_path)
    name = replicas["metadata"]["name"]
    if replicas["kind"] == "StatefulSet":
        service = named(overlay, "Service", replicas["spec"]["serviceName"])["spec"]
        assert service["clusterIP"] == "None"
        assert service["publishNotReadyAddresses"]
    expected = [f"{name}-{number}.{name}:50052" for number in range(replicas["spec"]["replicas"])]
    assert list(options.scheduler_addresses) == expected


@overlays
def test_probes_ask_what_answers_and_only_for_what_a_restart_would_mend(overlay: str):
    for pod, container in processes(overlay):
        ports, found = ports_of(container), probes(container)
        assert {"livenessProbe", "readinessProbe"} <= set(found), container["name"]
        for probe in found.values():
            if "grpc" in probe:
                assert probe["grpc"]["port"] == ports["grpc"]
            else:
                assert probe["httpGet"]["port"] in ports
                assert probe["httpGet"]["path"] in ("/health", "/metrics")
        assert found["readinessProbe"]["httpGet"]["path"] == "/health"
        # /health answers 503 while a process waits for others, which a restart would not mend.
        assert found["livenessProbe"].get("httpGet", {}).get("path") != "/health"
        # Kubernetes starts the next container after a sidecar's startup probe has succeeded; a worker's would succeed
        # only after the scheduler has started.
        if container in pod.spec.get("initContainers", []):
            assert container["restartPolicy"] == "Always"
            assert "startupProbe" not in found
        if container["name"] == "scheduler":
            probe = found["startupProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
            assert probe["httpGet"]["path"] == "/health"


@overlays
def test_schedulers_end_before_workers_and_what_drains_has_the_time_for_it(overlay: str, tmp_path: Path):
    for pod in pods(overlay):
        if pod.role == "worker":
            # A worker pod does not drain, and is deleted after its leader.
            continue
        (container,) = pod.spec["containers"]
        assert container["name"] == ("router" if pod.owner["kind"] == "Deployment" else "scheduler")
        options = options_of(overlay, pod, container, tmp_path)
        pause = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert pause[0] == "sleep"
        assert pod.spec["terminationGracePeriodSeconds"] >= options.drain_timeout + int(pause[1]) + 10


@overlays
def test_processes_of_a_pod_meet_in_a_private_directory(overlay: str, tmp_path: Path):
    for pod in pods(overlay):
        if pod.owner["kind"] != "StatefulSet":
            continue
        places = set()
        for container in pod.containers:
            options = options_of(overlay, pod, container, tmp_path)
            mount, volume = pod.mounted(container, options.runtime_dir)
            assert "emptyDir" in volume
            # A folder within the volume: the volume's own mode is not 0700, which the scheduler requires.
            assert options.runtime_dir.parent == Path(mount["mountPath"])
            assert not mount.get("readOnly")
            places.add((options.runtime_dir, volume["name"]))
        assert len(places) == 1


@overlays
def test_pods_are_confined(overlay: str):
    user = re.search(r"useradd --uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert user is not None
    for pod in pods(overlay):
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"]
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (int(user[1]),) * 3
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["automountServiceAccountToken"] is False
        # The variables that Kubernetes sets for a Service octavo-router would be taken for unknown options.
        assert pod.spec["enableServiceLinks"] is False
        for container in pod.containers:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"]
            assert own["capabilities"] == {"drop": ["ALL"]}
    assert named(overlay, "Namespace", "octavo")["metadata"]["labels"] == {
        "pod-security.kubernetes.io/enforce": "restricted"
    }


@overlays
def test_what_is_written_and_read_is_mounted(overlay: str):
    documentation = (ROOT / "docs" / "kubernetes.md").read_text()
    for pod, container in processes(overlay):
        for mount in container["volumeMounts"]:
            pod.volume(mount["name"])
        for name in ("OCTAVO_CACHE_DIR", "HF_HOME", "TRITON_CACHE_DIR"):
            if path := environment(container).get(name):
                assert "emptyDir" in pod.mounted(container, Path(path))[1]
        for volume in pod.spec["volumes"]:
            if "configMap" in volume:
                named(overlay, "ConfigMap", volume["configMap"]["name"])
            if "persistentVolumeClaim" in volume:
                named(overlay, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
                assert volume["persistentVolumeClaim"]["readOnly"]
            if "secret" in volume:
                # Secrets are made from files that belong in no repository.
                assert f"create secret generic {volume['secret']['secretName']} " in documentation


@overlays
def test_keys_are_mounted_where_they_are_looked_for_and_can_be_read_by_the_group_alone(overlay: str, tmp_path: Path):
    for pod, container in processes(overlay):
        options = options_of(overlay, pod, container, tmp_path)
        if not options.curve_dir:
            continue
        mount, volume = pod.mounted(container, Path(options.curve_dir))
        assert mount["readOnly"]
        # Files of a Secret belong to root and to fsGroup.
        assert volume["secret"]["defaultMode"] == 0o440
        paths = {item["path"] for item in volume["secret"]["items"]}
        if container["name"] == "scheduler":
            assert paths == {"scheduler.key_secret", "allowed_workers/worker.key"}
        else:
            assert paths == {"worker.key_secret", "scheduler.key"}


@pytest.mark.parametrize("overlay", ["gpu", "hosts"])
def test_a_gpu_for_each_worker(overlay: str, tmp_path: Path):
    for pod, container in processes(overlay):
        gpus = container["resources"].get("limits", {}).get("nvidia.com/gpu", "0")
        options = options_of(overlay, pod, container, tmp_path)
        assert options.device == "cuda"
        assert gpus == ("1" if container["name"] == "worker" else "0")
        if container["name"] == "worker":
            # Without tcp endpoints, all workers of a replica are assumed to see the GPUs of one host.
            assert options.world_size == 1 or options.meets_over_tcp(0)


@overlays
def test_images_are_those_of_this_version(overlay: str):
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    assert {container["image"] for _, container in processes(overlay)} == {f"octavo:{version[1]}"}


def write(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("kustomization", "complaint"),
    [
        ("resources: [other.yaml]", "no such file"),
        ("resources: [item.yaml]\npatches: [{path: patch.yaml}]", "there is no"),
        ("resources: [item.yaml, item.yaml]", "twice"),
        ("resources: [item.yaml]\nreplicas: []", "not known here"),
        ("configMapGenerator: [{name: x, behavior: replace, files: [item.yaml]}]", "behavior"),
    ],
)
def test_what_kustomize_refuses_is_refused_here(tmp_path: Path, kustomization: str, complaint: str):
    item, patch = (f"apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\n" for name in "ab")
    folder = write(tmp_path / "overlay", kustomization=kustomization, item=item, patch=patch)
    with pytest.raises(KustomizeError, match=complaint):
        build(folder)


def test_lists_are_merged_by_the_names_of_their_members(tmp_path: Path):
    head = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n"
    folder = write(
        tmp_path / "overlay",
        kustomization="resources: [item.yaml]\npatches: [{path: patch.yaml}]",
        item=head + "spec: {containers: [{name: x, args: [a], env: [{name: A, value: '1'}]}, {name: y}]}",
        patch=head
        + "spec: {containers: [{name: x, args: [b], env: [{name: B, value: '2'}]}, {name: y, $patch: delete}]}",
    )
    merged: list[dict[str, Any]] = build(folder)
    assert merged[0]["spec"]["containers"] == [
        {"name": "x", "args": ["b"], "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
    ]
