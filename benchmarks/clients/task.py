"""A small task for lm-eval, written to disk, and the log-likelihoods that transformers gives for it."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

# (context, continuation)
LINES = (
    ("The capital of France is", " Paris, a city on the Seine."),
    ("The capital of France is", " a small village in the Alps."),
    ("Water boils at a temperature of", " 100 degrees Celsius."),
    ("Water boils at a temperature of", " seven elephants."),
    ("Question: How many legs does a spider have?\nAnswer:", " Eight"),
    ("Question: How many legs does a spider have?\nAnswer:", " Six"),
    ("def add(a, b):\n    return", " a + b"),
    ("Once upon a time, in a land far away, there lived", " a king who had three daughters."),
    ("Die Hauptstadt von Österreich ist", " Wien, an der schönen blauen Donau."),
    ("1, 2, 3, 4, 5,", " 6, 7, 8, 9, 10"),
    ("To be, or not to be,", " that is the question: whether 'tis nobler in the mind to suffer"),
    ("The opposite of hot is", " cold."),
)
_SCORES = """\
task: octavo_scores
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{continuation}}}}"
target_delimiter: ""
metric_list: [{{metric: perplexity}}]
"""
_TEXT = """\
task: octavo_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{continuation}}}}"
generation_kwargs: {{until: ["<never>"], max_gen_toks: {max_tokens}, temperature: 0, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def write(directory: Path, prompt: str, continuation: str, max_tokens: int) -> None:
    """Writes two tasks: `octavo_scores`, log-likelihoods of LINES; `octavo_text`, the continuation of the prompt."""
    directory.mkdir(parents=True, exist_ok=True)
    lines, text = directory / "lines.jsonl", directory / "text.jsonl"
    lines.write_text(
        "".join(
            json.dumps({"id": number, "context": context, "continuation": continuation}) + "\n"
            for number, (context, continuation) in enumerate(LINES)
        )
    )
    text.write_text(json.dumps({"id": 0, "prompt": prompt, "continuation": continuation}) + "\n")
    (directory / "octavo_scores.yaml").write_text(_SCORES.format(path=lines))
    (directory / "octavo_text.yaml").write_text(_TEXT.format(path=text, max_tokens=max_tokens))


@torch.inference_mode()
def scores(model_directory: Path) -> Sequence[float]:
    """Returns the log-likelihood of each continuation of LINES after its context, by transformers in float32.

    As in lm-eval, the continuation's tokens are those that context and continuation have beyond the context's.
    """
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    found = []
    for context, continuation in LINES:
        whole = tokenizer(context + continuation, add_special_tokens=False).input_ids
        num_context = len(tokenizer(context, add_special_tokens=False).input_ids)
        logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        found.append(sum(logprobs[index - 1, whole[index]].item() for index in range(num_context, len(whole))))
    return found
