"""The steps of `octavo plan`, from the flags to the printed answer."""

import math
from collections.abc import Sequence
from dataclasses import replace

from configs.options import Options
from configs.quantization import KINDS
from octavo.lab.bounds import Bounds
from octavo.lab.errors import PlanError
from octavo.lab.settings import LAYOUT, GivenOptions, Setting, grid, parse_axis
from octavo.plan.costs.hardware import (
    Interconnect,
    default_interconnect,
    find_gpu,
    gpu_of_driver,
    machine_interconnect,
    parse_interconnect,
)
from octavo.plan.costs.model_shape import ModelShape, read_shape
from octavo.plan.costs.samples import read_measurements
from octavo.plan.flags import OPTION_AXES, PlanFlags
from octavo.plan.grid import best_of, try_setting
from octavo.plan.machine.advice import gpu_advice
from octavo.plan.machine.answers import print_cpu, print_tpu
from octavo.plan.machine.cpu_nodes import read_cpu_nodes
from octavo.plan.machine.gpu_links import gpu_names, read_gpu_links
from octavo.plan.recommend import layouts, print_advice, print_recommendation, reasons_of
from octavo.plan.recorded import Recording, read_recording
from octavo.plan.report import print_lines, print_table
from octavo.plan.targets import GpuTarget, Target, measured_target
from octavo.plan.workload import Workload, parse_lengths, read_arrivals, synthesize
from octavo.reports import progress_bar
from scheduler.settings import CORE_DRAFTERS


def answer_for_device(query: PlanFlags, given: GivenOptions) -> None:
    """Prints how a model is divided over this machine's CPUs, or its pages on TPUs. Raises PlanError, ConfigError."""
    for flag, value in (("--fit", query.fit), ("--gpu", query.gpu)):
        if value:
            raise PlanError(f"--device={query.device} and {flag}: give one of them")
    options = _base_options(query, given)
    model = _model(query, options)
    if query.device == "cpu":
        print_cpu(model, read_cpu_nodes(), as_json=query.as_json)
    else:
        longest = options.max_model_len or model.max_model_len
        print_tpu(model, max_model_len=longest, max_num_seqs=options.max_num_seqs, as_json=query.as_json)


def answer(query: PlanFlags, given: GivenOptions) -> bool:
    """Simulates the settings and prints the outcomes. Returns False if no setting keeps the limits.

    Raises PlanError, also if no setting fits, ConfigError and ModelNotFoundError.
    """
    _check_speculation(query, _base_options(query, given))
    recording = _recording(query)
    if recording is not None and given.config is None:
        # Options that are not given stay as they were recorded.
        recorded = {name: value for name, value in recording.options().items() if not query.axes.get(name)}
        given = replace(given, flags={**recorded, **given.flags})
        if not query.data_parallel_size:
            query = replace(query, data_parallel_size=str(recording.num_replicas))
    query, links = _with_own_gpus(query)
    options = _base_options(query, given)
    target = _target(query, recording, options, links)
    settings = _settings(query, target, options)

    def options_of(setting: Setting) -> Options:
        return given.options({name: setting.value(name) for name in OPTION_AXES})

    limits = Bounds(itl_ms=_limit(query.max_itl_ms), ttft_ms=_limit(query.max_ttft_ms))
    workload = _workload(query, target.max_model_len, recording)
    with progress_bar("settings", len(settings), hidden=query.as_json) as advance:
        outcomes = []
        for setting in settings:
            outcomes.append(try_setting(setting, target, options_of, workload, limits, acceptance=query.acceptance))
            advance(1)
    if all(outcome.run is None for outcome in outcomes):
        # The last setting uses the most GPUs.
        raise PlanError(outcomes[-1].obstacle)
    best = best_of(outcomes)
    reasons = reasons_of(outcomes, best) if query.num_gpus else None
    if query.as_json:
        print_lines(outcomes, best, reasons)
    else:
        print_table(outcomes, best, title=target.title, with_obstacles=reasons is None)
        if reasons is not None:
            print_recommendation(best, reasons)
        if isinstance(target, GpuTarget) and query.num_gpus > 1:
            _print_advice(target, query.num_gpus, workload, settings)
    if query.plot:
        from octavo.plan.plots import draw  # matplotlib takes half a second

        draw(query.plot, outcomes, limits, best, title=target.title)
    return best is not None


def _limit(milliseconds: float | None) -> float:
    return math.inf if milliseconds is None else milliseconds


def _check_speculation(query: PlanFlags, options: Options) -> None:
    speculation = options.speculative_config
    if query.acceptance is not None or speculation is None:
        return
    if not query.trace:
        raise PlanError(
            "speculative_config: what drafts gain depends on how many are right: give --acceptance, from 0 to 1, "
            "or a --trace, whose outputs tell"
        )
    if speculation.method not in CORE_DRAFTERS:
        raise PlanError(
            f"speculative_config: a trace does not tell what the drafter of method={speculation.method} would "
            f"propose: give --acceptance, from 0 to 1, or one of the methods {', '.join(CORE_DRAFTERS)}"
        )


def _print_advice(target: GpuTarget, num_gpus: int, workload: Workload, settings: Sequence[Setting]) -> None:
    num_rows = workload.concurrency or settings[0].value("max_num_seqs")
    context = int(workload.prompt_lens.mean() + workload.output_lens.mean() / 2)
    advice = gpu_advice(target.model, target.gpu, target.interconnect, num_gpus, num_rows=num_rows, context=context)
    print_advice(advice, num_rows=num_rows)


def _with_own_gpus(query: PlanFlags) -> tuple[PlanFlags, Interconnect | None]:
    """Puts this machine's GPUs in place of --gpu auto: their kind, their number and their links. Raises PlanError."""
    if query.gpu != "auto":
        return query, None
    names = gpu_names()
    gpu = gpu_of_driver(names[0])
    links = None
    if len(names) > 1 and not query.interconnect:
        found = read_gpu_links()
        links = machine_interconnect(
            gpu,
            num_gpus=found.num_gpus,
            num_nvlinks=found.num_nvlinks,
            island_size=found.island_size,
            pcie=found.worst_pcie,
        )
    has_layout = any(query.axes[name] for name in LAYOUT)
    return replace(query, gpu=gpu.name, num_gpus=query.num_gpus or (0 if has_layout else len(names))), links


def _base_options(query: PlanFlags, given: GivenOptions) -> Options:
    """The options that all settings share: axes with several values keep their defaults."""
    return given.options({n: query.axes[n] for n in OPTION_AXES if query.axes[n] and "," not in query.axes[n]})


def _recording(query: PlanFlags) -> Recording | None:
    if not query.trace:
        return None
    if query.arrivals:
        raise PlanError("--trace and --arrivals both give requests: give one of them")
    num_bytes = sum(path.stat().st_size for path in query.trace if path.is_file())
    with progress_bar("trace", num_bytes, hidden=query.as_json) as advance:
        return read_recording(query.trace, advance)


def _target(query: PlanFlags, recording: Recording | None, options: Options, links: Interconnect | None) -> Target:
    """links: those of --gpu auto."""
    has_steps = bool(query.fit) or (recording is not None and not query.gpu)
    if has_steps == bool(query.gpu):
        raise PlanError(
            "octavo plan needs to know what a step costs: give either --fit FILE, which "
            "`octavo bench throughput --json > FILE` makes, --trace FILE, which `octavo up --trace FILE` makes, or "
            "--gpu NAME"
        )
    if query.gpu:
        return _gpu_target(query, options, links)
    if query.num_gpus:
        raise PlanError(f"--num-gpus={query.num_gpus} needs --gpu: measured steps tell nothing about other layouts")
    if query.fit:
        return measured_target(read_measurements(query.fit), options)
    assert recording is not None
    return measured_target(recording.measurements(), options)


def _model(query: PlanFlags, options: Options) -> ModelShape:
    model = read_shape(query.model or options.model)
    if query.quantization not in (known := ("none", *KINDS)):
        raise PlanError(f"--quantization={query.quantization!r} is not known; use {' or '.join(known)}")
    if query.quantization == "none":
        return model
    return replace(model, layer_param_bytes=KINDS[query.quantization].param_bytes)


def _gpu_target(query: PlanFlags, options: Options, links: Interconnect | None) -> GpuTarget:
    gpu = find_gpu(query.gpu)
    if not 0 < query.gpu_memory_utilization <= 1:
        raise PlanError(f"--gpu-memory-utilization={query.gpu_memory_utilization:g} must be above 0 and at most 1")
    model = _model(query, options)
    if options.max_model_len > model.max_model_len:
        raise PlanError(
            f"max_model_len={options.max_model_len} is beyond the context length of {model.name}: use "
            f"{model.max_model_len} or less"
        )
    if links is None:
        links = parse_interconnect(query.interconnect or default_interconnect(gpu), gpu, query.gpus_per_node)
    return GpuTarget(
        gpu=gpu,
        model=model,
        interconnect=links,
        gpu_memory_utilization=query.gpu_memory_utilization,
        kv_value_bytes=1.0 if options.kv_cache_dtype in ("fp8", "fp8_e4m3") else 2.0,
        max_model_len=options.max_model_len or model.max_model_len,
    )


def _settings(query: PlanFlags, target: Target, options: Options) -> list[Setting]:
    axes = {name: parse_axis(text, name) if text else (getattr(options, name, 1),) for name, text in query.axes.items()}
    if not query.num_gpus:
        return grid(axes)
    assert isinstance(target, GpuTarget)
    if given := [name for name in LAYOUT if query.axes[name]]:
        raise PlanError(f"--num-gpus={query.num_gpus} tries every layout: leave out {', '.join(given)}, or --num-gpus")
    return [
        setting
        for layout in layouts(query.num_gpus, target.model)
        for setting in grid(axes | {name: (size,) for name, size in zip(LAYOUT, layout, strict=True)})
    ]


def _workload(query: PlanFlags, max_model_len: int, recording: Recording | None) -> Workload:
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
