"""The output of `octavo doctor`; one broken check costs no other."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from configs.groups.speculation import SpeculativeConfig
from configs.options import Options
from octavo.doctor import examine, probe
from octavo.doctor.examine import print_page
from octavo.doctor.machine import Check, Machine, State, gib, note, ok, problem
from octavo.doctor.subjects import limits
from octavo.doctor.subjects.memory import check_memory
from runtime.model_files import resolve_model
from tests.support.doctor import machine
from tests.support.models.tiny_model import make_tiny_model
from worker.models.loader import load_model
from worker.weights.quantization.kinds import QuantizationOption


def printed(*checks: Check) -> str:
    text = io.StringIO()
    print_page(checks, Console(file=text, width=60))
    return text.getvalue()


def test_the_page_shows_each_state_what_was_found_and_what_to_do() -> None:
    page = printed(ok("cores", "2"), note("clock", "slow", "use tsc"), problem("disk", "[full]", "free some space"))
    lines = [line.split() for line in page.splitlines()]
    assert lines == [
        ["ok", "cores", "2"],
        ["note", "clock", "slow"],
        ["to", "do:", "use", "tsc"],
        ["problem", "disk", "[full]"],
        ["to", "do:", "free", "some", "space"],
        ["1", "problem,", "1", "note."],
    ]
    assert printed(ok("cores", "2")).endswith("Nothing to do.\n")


def test_a_check_that_breaks_is_a_line_and_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(machine: Machine):
        raise OSError("no such device")
        yield

    monkeypatch.setattr(examine, "_CHECKS", {"GPU": breaks, "cores": lambda machine: iter([ok("cores", "2")])})
    broken, cores = examine.examine(Machine(options=Options()))
    assert (broken.state, broken.found) == (State.PROBLEM, "could not be checked: OSError: no such device")
    assert cores.state is State.OK


def test_a_slow_clock_and_one_that_nobody_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "is_synchronized", lambda: False)
    (found,) = limits.check_clock(Machine(options=Options()))
    assert (found.state, "nothing keeps it synchronized" in found.found) == (State.NOTE, True)
    monkeypatch.setattr(limits, "reading_ns", lambda: 1500.0)
    (found,) = limits.check_clock(Machine(options=Options()))
    assert "1500 ns a reading: slow" in found.found


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_weights_are_as_large_as_said(tmp_path: Path, quantization: QuantizationOption) -> None:
    """Wide enough that scales and padding are few percent, which is what the line may be off by.

    It reads no weights, so it can't know whether those in bfloat16 fit into 12 of their 16 bits, and counts 16."""
    model = make_tiny_model(tmp_path, hidden_size=512, intermediate_size=1024, vocab_size=4096, num_attention_heads=8)
    facts = probe.read_model(Options(model=str(model), quantization=quantization, device="cpu")).model
    loaded = load_model(resolve_model(str(model)), dtype=torch.bfloat16, load_format="dummy", quantization=quantization)
    assert facts is not None
    assert facts.quantization == loaded.quantization
    as_said = loaded.model.weight_bytes / facts.weight_bytes
    assert (0.75 if quantization == "none" else 0.95) < as_said < 1.05
    assert facts.draft_bytes == 0


def test_a_draft_model_counts(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path, hidden_size=512, intermediate_size=1024, vocab_size=4096))

    def facts(**more: Any) -> probe.ModelFacts:
        found = probe.read_model(Options(model=model, device="cpu", **more)).model
        assert found is not None
        return found

    speculation = SpeculativeConfig.model_validate({"method": "draft_model", "model": "same", "quantization": "int4"})
    alone, drafts, with_drafts = facts(), facts(quantization="int4"), facts(speculative_config=speculation)
    assert with_drafts.draft_bytes == drafts.weight_bytes
    assert with_drafts.block_bytes == 2 * alone.block_bytes
    checks = check_memory(machine(model=with_drafts, device="cpu", data_parallel_size=2, kv_cache_memory=0.01))
    found = next(check for check in checks if check.subject == "memory")
    assert f"draft model {gib(2 * drafts.weight_bytes)}" in found.found
