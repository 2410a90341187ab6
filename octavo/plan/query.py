"""The steps of `octavo plan`, from the flags to the printed answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.load import load_options
from configs.options import Options
from octavo.plan.costs.hardware import (
    Gpu,
    Interconnect,
    default_interconnect,
    find_gpu,
    gpu_of_driver,
    machine_interconnect,
    parse_interconnect,
)
from octavo.plan.costs.model_shape import read_shape
from octavo.plan.costs.samples import read_measurements
from octavo.plan.errors import PlanError
from octavo.plan.grid import AXES, Limits, best_of, parse_axis, settings_of, try_settings
from octavo.plan.machine.advice import gpu_advice
from octavo.plan.machine.answers import print_cpu, print_tpu
from octavo.plan.machine.cpu_nodes import read_cpu_nodes
from octavo.plan.machine.gpu_links import gpu_names, read_gpu_links
from octavo.plan.recommend import layouts, print_advice, print_recommendation, recommend
from octavo.plan.recorded import Recording, read_recording
from octavo.plan.report import print_lines, print_table
from octavo.plan.targets import GpuTarget, Setting, Target, measured_target
from octavo.plan.workload import Workload, parse_lengths, read_arrivals, synthesize
from octavo.reports import progress_bar
from scheduler.settings import CORE_DRAFTERS

_OPTION_AXES = ("max_num_seqs", "max_num_batched_tokens", "data_parallel_size")
_LAYOUT_AXES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
# By quantization. One scale per output is negligible; int4 has two 16-bit numbers per 32 weights.
_LAYER_PARAM_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 4 / 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuQuery:
    """The flags for GPUs. name: empty if the costs are measured; auto: this machine's. num_gpus: GPUs to find a layout
    for, or 0."""

    name: str
    model: str
    num_gpus: int
    interconnect: str
    gpus_per_node: int
    gpu_memory_utilization: float
    quantization: str
    # This machine's, for the name auto.
    own_links: Interconnect | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadQuery:
    num_requests: int
    request_rate: float
    concurrency: int
    prompt_len: str
    output_len: str
    shared_prefix: float
    num_prefixes: int
    arrivals: Path | None
    # Files of recorded traces (`octavo up --trace`).
    trace: Sequence[Path]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """The flags of the command as given; those of options and axes are text."""

    config: Path | None
    option_flags: Mapping[str, object]
    # By name, for all AXES; empty: the option's value only.
    axes: Mapping[str, str]
    fit: Sequence[Path]
    gpu: GpuQuery
    workload: WorkloadQuery
    # The probability that a draft is right; None: plans without speculation.
    acceptance: float | None
    max_itl_ms: float | None
    max_ttft_ms: float | None


def answer_for_device(query: Query, device: str, *, as_json: bool) -> None:
    """Prints how a model is divided over this machine's CPUs, or its pages on TPUs. Raises PlanError, ConfigError."""
    for flag, given in (("--fit", bool(query.fit)), ("--gpu", bool(query.gpu.name))):
        if given:
            raise PlanError(f"--device={device} and {flag}: give one of them")
    options, model = _base_options(query), read_shape(query.gpu.model or _base_options(query).model)
    if query.gpu.quantization in _LAYER_PARAM_BYTES:
        model = replace(model, layer_param_bytes=_LAYER_PARAM_BYTES[query.gpu.quantization])
    if device == "cpu":
        print_cpu(model, read_cpu_nodes(), as_json=as_json)
    else:
        longest = options.max_model_len or model.max_model_len
        print_tpu(model, max_model_len=longest, max_num_seqs=options.max_num_seqs, as_json=as_json)


def answer(query: Query, *, plot: Path | None, as_json: bool) -> bool:
    """Simulates the settings and prints the outcomes. Returns False if no setting keeps the limits.

    Raises PlanError, also if no setting fits, ConfigError and ModelNotFoundError.
    """
    speculation = _base_options(query).speculative_config
    if query.acceptance is None and speculation is not None:
        if not query.workload.trace:
            raise PlanError(
                "speculative_config: what drafts gain depends on how many are right: give --acceptance, from 0 to 1, "
                "or a --trace, whose outputs tell"
            )
        if speculation.method not in CORE_DRAFTERS:
            raise PlanError(
                f"speculative_config: a trace does not tell what the drafter of method={speculation.method} would "
                f"propose: give --acceptance, from 0 to 1, or one of the methods {', '.join(CORE_DRAFTERS)}"
            )
    recording = _recording(query, as_json=as_json)
    if recording is not None and query.config is None:
        # Options that are not given stay as they were recorded.
        given = {name for name, value in query.axes.items() if value}
        recorded = {name: value for name, value in recording.options().items() if name not in given}
        query = replace(query, option_flags={**recorded, **query.option_flags})
        if not query.axes["data_parallel_size"]:
            query = replace(query, axes={**query.axes, "data_parallel_size": str(recording.num_replicas)})
    query = _with_own_gpus(query)
    target = _target(query, recording)
    settings = _settings(query, target)

    def options_of(setting: Setting) -> Options:
        return load_options(query.config, {**query.option_flags, **{n: getattr(setting, n) for n in _OPTION_AXES}})

    limits = Limits(itl_ms=query.max_itl_ms, ttft_ms=query.max_ttft_ms)
    workload = _workload(query.workload, target.max_model_len, recording)
    with progress_bar("settings", len(settings), hidden=as_json) as advance:
        outcomes = try_settings(settings, target, options_of, workload, advance, acceptance=query.acceptance)
    if all(outcome.run is None for outcome in outcomes):
        # The last setting uses the most GPUs.
        raise PlanError(outcomes[-1].obstacle)
    best = best_of(outcomes, limits)
    recommendation = recommend(outcomes, limits, best) if query.gpu.num_gpus else None
    if as_json:
        print_lines(outcomes, limits, best, recommendation and recommendation.reasons)
    else:
        print_table(outcomes, limits, best, title=target.title, with_obstacles=recommendation is None)
        if recommendation:
            print_recommendation(recommendation)
        if isinstance(target, GpuTarget) and query.gpu.num_gpus > 1:
            _print_advice(target, query.gpu.num_gpus, workload, settings)
    if plot:
        from octavo.plan.plots import draw  # matplotlib takes half a second

        draw(plot, outcomes, limits, best, title=target.title)
    return best is not None


def _print_advice(target: GpuTarget, num_gpus: int, workload: Workload, settings: Sequence[Setting]) -> None:
    num_rows = workload.concurrency or settings[0].max_num_seqs
    context = int(workload.prompt_lens.mean() + workload.output_lens.mean() / 2)
    advice = gpu_advice(target.model, target.gpu, target.interconnect, num_gpus, num_rows=num_rows, context=context)
    print_advice(advice, num_rows=num_rows)


def _with_own_gpus(query: Query) -> Query:
    """Puts this machine's GPUs in place of --gpu auto: their kind, their number and their links. Raises PlanError."""
    if query.gpu.name != "auto":
        return query
    names = gpu_names()
    gpu = gpu_of_driver(names[0])
    links = None
    if len(names) > 1 and not query.gpu.interconnect:
        found = read_gpu_links()
        links = machine_interconnect(
            gpu,
            num_gpus=found.num_gpus,
            num_nvlinks=found.num_nvlinks,
            island_size=found.island_size,
            pcie=found.worst_pcie,
        )
    given = any(query.axes[name] for name in _LAYOUT_AXES)
    num_gpus = query.gpu.num_gpus or (0 if given else len(names))
    return replace(query, gpu=replace(query.gpu, name=gpu.name, num_gpus=num_gpus, own_links=links))


def _base_options(query: Query) -> Options:
    """The options that all settings share: axes with several values keep their defaults."""
    single = {name: query.axes[name] for name in _OPTION_AXES if query.axes[name] and "," not in query.axes[name]}
    return load_options(query.config, {**query.option_flags, **single})


def _recording(query: Query, *, as_json: bool) -> Recording | None:
    files = query.workload.trace
    if not files:
        return None
    if query.workload.arrivals:
        raise PlanError("--trace and --arrivals both give requests: give one of them")
    num_bytes = sum(path.stat().st_size for path in files if path.is_file())
    with progress_bar("trace", num_bytes, hidden=as_json) as advance:
        return read_recording(files, advance)


def _target(query: Query, recording: Recording | None) -> Target:
    has_steps = bool(query.fit) or (recording is not None and not query.gpu.name)
    if has_steps == bool(query.gpu.name):
        raise PlanError(
            "octavo plan needs to know what a step costs: give either --fit FILE, which "
            "`octavo bench throughput --json > FILE` makes, --trace FILE, which `octavo up --trace FILE` makes, or "
            "--gpu NAME"
        )
    options = _base_options(query)
    if not query.gpu.name:
        if query.gpu.num_gpus:
            raise PlanError(
                f"--num-gpus={query.gpu.num_gpus} needs --gpu: measured steps tell nothing about other layouts"
            )
        if query.fit:
            return measured_target(read_measurements(query.fit), options)
        assert recording is not None
        return measured_target(recording.measurements(), options)
    return _gpu_target(query.gpu, options)


def _gpu_target(query: GpuQuery, options: Options) -> GpuTarget:
    gpu, model = find_gpu(query.name), read_shape(query.model or options.model)
    if not 0 < query.gpu_memory_utilization <= 1:
        raise PlanError(f"--gpu-memory-utilization={query.gpu_memory_utilization:g} must be above 0 and at most 1")
    if query.quantization not in (known := ("none", *_LAYER_PARAM_BYTES)):
        raise PlanError(f"--quantization={query.quantization!r} is not known; use {' or '.join(known)}")
    if query.quantization != "none":
        model = replace(model, layer_param_bytes=_LAYER_PARAM_BYTES[query.quantization])
    if options.max_model_len > model.max_model_len:
        raise PlanError(
            f"max_model_len={options.max_model_len} is beyond the context length of {model.name}: use "
            f"{model.max_model_len} or less"
        )
    return GpuTarget(
        gpu=gpu,
        model=model,
        interconnect=query.own_links or _asked_links(query, gpu),
        gpu_memory_utilization=query.gpu_memory_utilization,
        kv_value_bytes=1.0 if options.kv_cache_dtype in ("fp8", "fp8_e4m3") else 2.0,
        max_model_len=options.max_model_len or model.max_model_len,
    )


def _asked_links(query: GpuQuery, gpu: Gpu) -> Interconnect:
    return parse_interconnect(query.interconnect or default_interconnect(gpu), gpu, query.gpus_per_node)


def _settings(query: Query, target: Target) -> list[Setting]:
    options = _base_options(query)
    axes = {
        name: parse_axis(query.axes[name], name) if query.axes[name] else (getattr(options, name, 1),) for name in AXES
    }
    num_gpus = query.gpu.num_gpus
    if not num_gpus:
        return settings_of(axes)
    assert isinstance(target, GpuTarget)
    given = [name for name in _LAYOUT_AXES if query.axes[name]]
    if given:
        raise PlanError(f"--num-gpus={num_gpus} tries every layout: leave out {', '.join(given)}, or --num-gpus")
    return [
        setting
        for tensor, stages, replicas in layouts(num_gpus, target.model)
        for setting in settings_of(axes | dict(zip(_LAYOUT_AXES, ((tensor,), (stages,), (replicas,)), strict=True)))
    ]


def _workload(query: WorkloadQuery, max_model_len: int, recording: Recording | None) -> Workload:
    if recording is not None:
        return recording.workload(query.concurrency)
    if query.arrivals:
        workload = read_arrivals(query.arrivals, shared_prefix=query.shared_prefix)
        return replace(workload, concurrency=query.concurrency)
    if not query.request_rate > 0:
        raise PlanError(f"--request-rate={query.request_rate:g} is not above 0")
    return synthesize(
        num_requests=query.num_requests,
        rate=query.request_rate,
        concurrency=query.concurrency,
        prompt_len=parse_lengths(query.prompt_len, "--prompt-len"),
        output_len=parse_lengths(query.output_len, "--output-len"),
        max_model_len=max_model_len,
        shared_prefix=query.shared_prefix,
        num_prefixes=query.num_prefixes,
        seed=query.seed,
    )
