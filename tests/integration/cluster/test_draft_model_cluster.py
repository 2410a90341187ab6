"""A draft model in a cluster: the same output as without, also when the rank that drafts dies.

`octavo up`, real processes. The model has two stages of two ranks each; the draft model is whole, on the rank that
returns results.
"""

import json
import re
import shutil
import urllib.request
from pathlib import Path

from octavo import LLM, SamplingParams
from tests.support.models.tiny_model import make_tiny_model
from tests.support.ports import free_ports
from tests.support.streams import say
from tests.support.up import Up

PROMPTS = ["w5 w6 w7", "w9 w8", " ".join(f"w{i}" for i in range(10, 60)), "w11"]
# Two requests are sampled, two are greedy.
SAMPLING = [
    SamplingParams(temperature=0.8 * (number >= 2), seed=number, max_tokens=100, ignore_eos=True)
    for number in range(len(PROMPTS))
]
OPTIONS = {"dtype": "float32", "kv_cache_memory": 0.01, "load_format": "dummy"}


def test_drafts_of_one_rank_serve_all(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    draft = shutil.copytree(model, tmp_path / "draft")
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    expected = [each.choices[0].token_ids for each in LLM(str(model), **OPTIONS).generate(conversations, SAMPLING)]
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    metrics_port = free_ports(6)
    with Up(
        tmp_path,
        f"--model={model}",
        "--tensor-parallel-size=2",
        "--pipeline-parallel-size=2",
        "--max-num-seqs=8",
        f"--speculative-config={json.dumps(config)}",
        *(f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()),
        real=True,
        metrics_port=metrics_port,
    ) as up:
        up.wait_for("serving; Ctrl-C to stop")
        assert say(up.port, PROMPTS, SAMPLING, lambda: None) == expected
        # The router's metrics are at the port before.
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port + 1}/metrics", timeout=10) as answer:
            found = re.search(r"^octavo_accepted_draft_tokens_total\S* (\S+)", answer.read().decode(), re.M)
        assert found is not None
        # How many depends on what steps cost while it runs.
        assert float(found[1]) > 0
        victim = next(each for each in up.children_of("worker") if each.cmdline()[-1] == "2")
        assert say(up.port, PROMPTS, SAMPLING, victim.kill) == expected
        assert not victim.is_running()
        up.wait_for("was killed by SIGKILL; starting it again")
