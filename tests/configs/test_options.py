"""Options: one definition each, three ways to give them, and errors that say what would work."""

from pathlib import Path

import pytest

from configs.groups.compilation import CompilationConfig, CompilationLevel, CompilationMode, CUDAGraphMode
from configs.load import ConfigError, load_options
from configs.options import Options
from tests.support.repository import ROOT, files, name


def write(folder: Path, text: str) -> Path:
    path = folder / "octavo.yaml"
    path.write_text(text)
    return path


def test_every_option_has_a_description_and_a_group():
    # `octavo up --help` is generated from these.
    for option, field in Options.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict), option
        assert extra["group"], option
        assert field.description, option
        assert field.description.endswith("."), option


@pytest.mark.parametrize("path", list(files(".yaml", under=ROOT / "configs")), ids=name)
def test_every_configuration_in_the_repository_loads(path: Path):
    load_options(path, environ={})


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path):
    path = write(tmp_path, "max_num_seqs: 8\nblock_size: 8\nport: 1000\n")
    environ = {"OCTAVO_MAX_NUM_SEQS": "16", "OCTAVO_BLOCK_SIZE": "32", "HOME": "/"}
    options = load_options(path, {"max_num_seqs": 24}, environ)
    assert (options.max_num_seqs, options.block_size, options.port) == (24, 32, 1000)
    assert options.max_num_batched_tokens == 2048


def test_octavo_config_names_the_file(tmp_path: Path):
    path = write(tmp_path, "port: 1000\n")
    assert load_options(environ={"OCTAVO_CONFIG": str(path)}).port == 1000
    other = tmp_path / "other.yaml"
    other.write_text("port: 2000\n")
    assert load_options(other, environ={"OCTAVO_CONFIG": str(path)}).port == 2000


def test_dashes_in_a_file_are_underscores(tmp_path: Path):
    assert load_options(write(tmp_path, "max-num-seqs: 8\n"), environ={}).max_num_seqs == 8


def test_an_empty_file_gives_the_defaults(tmp_path: Path):
    assert load_options(write(tmp_path, "# nothing\n"), environ={}) == load_options(environ={})


def test_lists_come_as_yaml_lists_and_as_comma_separated_text(tmp_path: Path):
    path = write(tmp_path, "data_parallel_size: 2\nscheduler_addresses: ['a:1', 'b:1']\n")
    assert load_options(path, environ={}).scheduler_addresses == ("a:1", "b:1")
    environ = {"OCTAVO_SCHEDULER_ADDRESSES": "c:1, d:1"}
    assert load_options(path, environ=environ).scheduler_addresses == ("c:1", "d:1")


def test_booleans_come_as_text():
    assert load_options(environ={"OCTAVO_ENABLE_PREFIX_CACHING": "false"}).enable_prefix_caching is False
    assert load_options(environ={"OCTAVO_DISABLE_LOG_STATS": "1"}).disable_log_stats is True


@pytest.mark.parametrize(
    ("text", "environ", "flags", "words"),
    [
        ("max_num_seq: 8", {}, {}, ["max_num_seq'", "octavo.yaml", "did you mean 'max_num_seqs'"]),
        ("", {"OCTAVO_BLOCKSIZE": "8"}, {}, ["blocksize'", "in the environment", "did you mean 'block_size'"]),
        ("", {}, {"zzzzzz": 1}, ["zzzzzz", "as a flag", "octavo up --help"]),
        (
            "enable_chunked_prefill: false",
            {},
            {"inter_token_latency_target": 200},
            ["inter_token_latency_target=200 needs enable_chunked_prefill", "leave one of the two out"],
        ),
        ("max_num_seqs: 0", {}, {}, ["max_num_seqs=0", "octavo.yaml", "greater than or equal to 1"]),
        (
            "",
            {"OCTAVO_BLOCK_SIZE": "12"},
            {},
            ["block_size=", "12", "in the environment", "8, 16, 32, 64, 128, 256, 512 or 1024"],
        ),
        ("", {}, {"port": 70_000}, ["port=70000", "as a flag", "65535"]),
        ("max_num_seqs: many", {}, {}, ["max_num_seqs='many'", "integer"]),
        ("kv_cache_memory: .inf", {}, {}, ["kv_cache_memory=inf", "octavo.yaml"]),
        ("kv_cache_memory: .nan", {}, {}, ["kv_cache_memory=nan", "octavo.yaml"]),
        ("dtype: float16", {}, {}, ["dtype='float16'", "'float32'", "'bfloat16'"]),
        ("max_model_len: 1", {}, {}, ["max_model_len=1", "2 or more"]),
        ("override_generation_config: {top_p: 2}", {}, {}, ["octavo.yaml", "top_p=2", "(0, 1]"]),
        ("override_generation_config: {top_k: 0.5}", {}, {}, ["top_k=0.5", "at least 1"]),
        ("", {}, {"override_generation_config": '{"n": 2}'}, ["as a flag", "'n'", "temperature, top_p, top_k"]),
        ("", {}, {"override_generation_config": "{"}, ["not valid JSON", '{"temperature": 0.2, "top_p": 0.9}']),
        ("- a\n- b", {}, {}, ["octavo.yaml", "option: value"]),
        ("a: [", {}, {}, ["octavo.yaml", "not valid YAML"]),
        ("scheduler_addresses: a:1,b:1", {}, {}, ["scheduler_addresses", "2 addresses", "data_parallel_size is 1"]),
        ("step_addresses: udp://a:1", {}, {}, ["udp://a:1", "ipc://", "tcp://"]),
        ("step_addresses: tcp://a:1", {}, {}, ["tcp://a:1", "curve_dir", "octavo keys"]),
        ("tensor_parallel_size: 65", {}, {}, ["tensor_parallel_size=65", "less than or equal to 64"]),
        ("num_redundant_experts: 2", {}, {}, ["num_redundant_experts=2", "needs enable_expert_parallel"]),
        ("worker_host: 10.0.0.2", {}, {}, ["worker_host='10.0.0.2'", "several machines", "tcp://", "loopback"]),
    ],
)
def test_an_error_names_the_option_the_value_where_it_stands_and_what_works(
    tmp_path: Path, text: str, environ: dict[str, str], flags: dict[str, object], words: list[str]
):
    with pytest.raises(ConfigError) as caught:
        load_options(write(tmp_path, text + "\n"), flags, environ)
    for word in words:
        assert word in str(caught.value)


def test_every_bad_option_is_named_at_once(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        load_options(write(tmp_path, "max_num_seqs: 0\nport: -1\n"), environ={})
    port, max_num_seqs = str(caught.value).split("; ")
    assert port.startswith("port=-1 ")
    assert max_num_seqs.startswith("max_num_seqs=0 ")


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_options(tmp_path / "nowhere.yaml", environ={})


def test_yaml_cannot_make_python_objects(tmp_path: Path):
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_options(write(tmp_path, "model: !!python/object/apply:os.getcwd []\n"), environ={})


def test_a_file_of_options_leaves_out_what_has_another_meaning_if_it_is_given() -> None:
    """Processes of a cluster read such a file: blocks of another size, or images within kv_cache_memory instead of
    beside it, would be the result."""
    left_out = {"block_size", "kv_cache_memory"}
    assert not left_out & Options().as_file().keys()
    given = Options(block_size=16, kv_cache_memory=1.0)
    assert left_out <= given.as_file().keys()
    assert Options(**given.as_file()) == given


def test_options_cannot_be_changed():
    options = load_options(environ={})
    with pytest.raises(ValueError, match="frozen"):
        options.port = 1


def test_addresses_default_to_sockets_in_the_runtime_directory():
    options = load_options(flags={"runtime_dir": "/run/octavo", "data_parallel_size": 2}, environ={})
    assert options.scheduler_address(1) == "unix:/run/octavo/scheduler-1.sock"
    assert options.step_address(1) == "ipc:///run/octavo/step-1.sock"


def test_metrics_ports_of_a_cluster_are_distinct_and_zero_turns_them_off():
    options = load_options(flags={"data_parallel_size": 2, "metrics_port": 9000}, environ={})
    ports = [
        options.process_metrics_port("router"),
        *(options.process_metrics_port(kind, replica) for kind in ("scheduler", "worker") for replica in (0, 1)),
    ]
    assert ports == [9000, 9001, 9002, 9003, 9004]
    assert load_options(flags={"metrics_port": 0}, environ={}).process_metrics_port("worker", 1) == 0


def test_routers_have_the_first_ports_of_metrics_and_ports_in_a_row() -> None:
    flags: dict[str, object] = {"num_routers": 3, "data_parallel_size": 2, "metrics_port": 9000}
    options = load_options(flags=flags, environ={})
    ports = [
        *(options.process_metrics_port("router", router) for router in range(3)),
        *(options.process_metrics_port(kind, replica) for kind in ("scheduler", "worker") for replica in (0, 1)),
    ]
    assert ports == list(range(9000, 9000 + options.num_processes))
    assert [options.router_port(router) for router in range(3)] == [50051, 50052, 50053]
    assert [options.router_http_port(router) for router in range(3)] == [8000, 8001, 8002]
    without = load_options(flags=flags | {"port": 0, "http_port": 0}, environ={})
    assert without.router_port(2) == without.router_http_port(2) == 0
    with pytest.raises(ConfigError, match=r"port=8001 and http_port=8000: .* 3 or more apart"):
        load_options(flags=flags | {"port": 8001}, environ={})
    with pytest.raises(ConfigError, match=r"http_port=65534: num_routers=3 take as many .* use 65533 or less"):
        load_options(flags=flags | {"http_port": 65_534}, environ={})


def test_each_rank_has_a_port_of_its_own() -> None:
    options = load_options(flags={"data_parallel_size": 2, "tensor_parallel_size": 3, "metrics_port": 9000}, environ={})
    assert options.world_size == 3
    ports = [options.process_metrics_port("worker", replica, rank) for replica in (0, 1) for rank in range(3)]
    assert ports == [9003, 9004, 9005, 9006, 9007, 9008]
    with pytest.raises(ConfigError, match="metrics_port=65533: 4 processes"):
        load_options(flags={"tensor_parallel_size": 2, "metrics_port": 65_533}, environ={})


def test_the_ports_of_all_processes_must_exist() -> None:
    assert load_options(flags={"metrics_port": 65_533}, environ={}).process_metrics_port("worker") == 65_535
    with pytest.raises(ConfigError, match="metrics_port=65534: 3 processes take as many ports from there; use 65533"):
        load_options(flags={"metrics_port": 65_534}, environ={})


def test_graph_settings_come_as_a_mapping_and_as_json_and_sizes_get_in_order(tmp_path: Path):
    path = write(tmp_path, "compilation_config: {level: PIECEWISE, cudagraph_capture_sizes: [8, 1, 8]}\n")
    in_file = load_options(path, environ={}).compilation_config
    as_flag = load_options(
        flags={"compilation_config": '{"level": "PIECEWISE", "cudagraph_capture_sizes": [1, 8]}'}, environ={}
    ).compilation_config
    assert in_file == as_flag
    assert (in_file.level, in_file.cudagraph_capture_sizes) == ("PIECEWISE", (1, 8))


@pytest.mark.parametrize(
    ("given", "level"),
    [
        (0, "NONE"),
        (1, "NONE"),
        ("2", "NONE"),
        ("3", "PIECEWISE"),
        ('{"level": 3}', "PIECEWISE"),
        (CompilationConfig(level=CompilationLevel.PIECEWISE), "PIECEWISE"),
        (CompilationConfig(CompilationLevel.NO_COMPILATION), "NONE"),
        (CompilationConfig(mode=CompilationMode.VLLM_COMPILE), "FULL"),
        (CompilationConfig(mode=CompilationMode.DYNAMO_TRACE_ONCE), "NONE"),
        ('{"mode": "VLLM_COMPILE"}', "FULL"),
        ('{"mode": 3, "cudagraph_mode": "PIECEWISE"}', "PIECEWISE"),
        ({"level": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"}, "FULL"),
        (CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE), "NONE"),
        (CompilationConfig(cudagraph_mode="FULL_DECODE_ONLY"), "FULL"),
        (CompilationConfig(level="FULL"), "FULL"),
        (CompilationConfig(), "FULL"),
    ],
)
def test_graph_settings_come_as_vllm_writes_them(given: object, level: str) -> None:
    loaded = load_options(flags={"compilation_config": given}, environ={})
    assert loaded.compilation_config.level == level
    assert Options(**loaded.as_file()).compilation_config == loaded.compilation_config


def test_a_level_comes_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    in_file = load_options(write(tmp_path, "compilation_config: 3\n"), environ={})
    in_environment = load_options(environ={"OCTAVO_COMPILATION_CONFIG": "3"})
    assert in_file.compilation_config.level == in_environment.compilation_config.level == "PIECEWISE"


def test_graph_settings_of_vllms_guide() -> None:
    guide = CompilationConfig(level=CompilationLevel.PIECEWISE, cudagraph_capture_sizes=[1, 2, 4, 8, 16])
    assert (guide.level, guide.cudagraph_capture_sizes) == ("PIECEWISE", (1, 2, 4, 8, 16))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"level": "3"}', ["compilation_config.level='3' as a flag", "'NONE', 'PIECEWISE' or 'FULL'"]),
        ('{"cudagraph_capture_sizes": [0]}', ["compilation_config.cudagraph_capture_sizes.0=0", "equal to 1"]),
        ("FULL", ["compilation_config='FULL' as a flag", "not valid JSON", '"level"']),
        ("4", ["level=4: use one of 0 (NO_COMPILATION)", "3 (PIECEWISE)"]),
        ('{"mode": 7}', ["mode=7: use one of 0 (NONE)", "3 (VLLM_COMPILE)"]),
        ('{"cudagraph_mode": "ALL"}', ["cudagraph_mode='ALL': use one of NONE, PIECEWISE, FULL"]),
        ('{"level": 3, "mode": 3}', ["level=3 and mode=3", "give one of them"]),
        ('{"level": "FULL", "cudagraph_mode": "NONE"}', ["both choose the graphs: give one of them"]),
        ("true", ["compilation_config=True as a flag", "valid dictionary"]),
    ],
)
def test_graph_settings_that_cannot_be_are_refused(text: str, words: list[str]):
    with pytest.raises(ConfigError) as error:
        load_options(flags={"compilation_config": text}, environ={})
    assert all(word in str(error.value) for word in words), error.value


def test_allowed_hosts_are_names():
    given = "localhost, .example.com,*,a-b.example.,10.0.0.7,::1"
    assert len(load_options(None, {"allowed_hosts": given}, {}).allowed_hosts) == 6
    for wrong in ("http://a.example", "a.example:8000", "a b", "*.example.com"):
        with pytest.raises(ConfigError, match=r"allowed_hosts: .* is no host: use names without scheme and port"):
            load_options(None, {"allowed_hosts": wrong}, {})
