"""Options of the router: its addresses, its routing, and its limits."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator

from configs.groups.field import ROUTER, option, split_commas

Compat = Annotated[tuple[Literal["vllm", "smg", "sglang", "kserve"], ...], BeforeValidator(split_commas)]
ToolCallParser = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "functiongemma",
    "gemma4",
    "granite",
    "granite4",
    "hermes",
    "llama3_json",
    "llama4_pythonic",
    "mistral",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
]
ReasoningParser = Literal["auto", "none", "deepseek_r1", "gemma4", "granite", "mistral", "openai_gptoss", "qwen3"]
Names = Annotated[tuple[str, ...], BeforeValidator(split_commas)]
# A name as the header Host has it, without a port; or what stands for several.
_HOST = re.compile(r"\*|\.?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?|[0-9A-Fa-f:.]+")


class RouterOptions(BaseModel):
    """Part of configs.options.Options, which validates all groups."""

    host: str = option(ROUTER, "127.0.0.1", "Address that the router's gRPC server binds to.")
    port: int = option(ROUTER, 50051, "Port of the router's gRPC server. 0: any free one.", ge=0, le=65_535)
    http_port: int = option(
        ROUTER,
        8000,
        "Port, at the same address, of the router's HTTP server: /v1/completions, /v1/chat/completions and /v1/models "
        "as OpenAI's clients call them. 0: none.",
        ge=0,
        le=65_535,
    )
    console: bool = option(
        ROUTER,
        False,
        "Serve a page at /console of http_port that chats and shows the cluster at work. Without API keys it answers "
        "this machine only; with keys a tenant sees its own requests, a key with `admin: true` the cluster.",
    )
    num_routers: int = option(
        ROUTER,
        1,
        "Number of routers that `octavo up` starts over the same schedulers. Each has its own ports: port and "
        "http_port grow by one per router. Clients that know several continue through another one when theirs dies.",
        ge=1,
        le=64,
    )
    api_server_count: int = option(
        ROUTER,
        1,
        "Number of processes that `octavo up` starts per router. They share its port and http_port (SO_REUSEPORT), and "
        "the system distributes connections among them. Each uses one core. Limits of the router, and max_streams of "
        "API keys, apply to each process.",
        ge=1,
        le=64,
    )
    compat: Compat = option(
        ROUTER,
        (),
        "Other projects' gRPC services that the router also serves, comma-separated. vllm: vLLM's own, vllm.Inference "
        "and vllm.Control. smg: VllmEngine, by which the SMG gateway reaches an engine; needs octavo[smg]. sglang: "
        "SglangScheduler, by which SMG and sglang-router reach an engine. kserve: GRPCInferenceService, for Triton's "
        "clients.",
    )
    routing_policy: Literal["least_loaded", "round_robin", "power_of_two", "prefix_aware", "consistent_hash"] = option(
        ROUTER,
        "least_loaded",
        "How to choose a request's replica. least_loaded: the one with the fewest tokens to compute. round_robin: each "
        "in turn. power_of_two: the less loaded of two random ones. prefix_aware: the one that can give the first "
        "token soonest, by its queue and by the part of the prompt in its prefix cache. consistent_hash: always the "
        "same one for a session_key, unless it is overloaded.",
    )
    max_message_bytes: int = option(
        ROUTER, 16 * 2**20, "Largest message that the router takes from a client.", ge=65_536, le=2**30
    )
    max_bodies_bytes: int = option(
        ROUTER,
        256 * 2**20,
        "Bytes of HTTP request bodies that a router process holds at once, and as many of gRPC messages above 64 KiB "
        "until they are accepted. A caller (tenant, or connection if there are no keys) gets at most as many as are "
        "free. Beyond that, requests are refused with status 429 or RESOURCE_EXHAUSTED. Divided by max_message_bytes: "
        "the calls that may wait for their message at once.",
        ge=65_536,
        le=2**36,
    )
    max_answers_bytes: int = option(
        ROUTER,
        2**30,
        "Bytes of answers that come whole (without stream) and are not sent yet, which a router process holds at once; "
        "answers below 64 KiB do not count. A caller (tenant, or connection if there are no keys) gets at most as many "
        "as are free: one alone half of them. Beyond that, an answer ends with status 429 or RESOURCE_EXHAUSTED; one "
        "whose n x max_tokens x logprobs could never fit, at 64 bytes a logprob, is refused with 400 or "
        "INVALID_ARGUMENT.",
        ge=2**20,
        le=2**40,
    )
    strict_fields: bool = option(
        ROUTER,
        False,
        "Refuse HTTP requests with a field that is not known, instead of ignoring it and naming it in the header "
        "X-Octavo-Ignored-Fields of the answer.",
    )
    allowed_origins: Names = option(
        ROUTER,
        (),
        "Web pages that may call the HTTP API from a browser, by their origin, comma-separated: "
        "https://chat.example.org, or * for any (CORS).",
    )
    allowed_hosts: Names = option(
        ROUTER,
        (),
        "Names by which clients may call the HTTP API of a router without API keys, comma-separated, besides localhost "
        "and, if host is no loopback address, IP addresses, names without a dot, this machine's own name and those "
        "under .local and .internal. .example.com: that name and all below it; *: any. Others are refused: they may "
        "be those of web pages (DNS rebinding).",
    )
    responses_dir: str = option(
        ROUTER,
        "",
        "Directory for the stored responses of /v1/responses, which previous_response_id continues. Routers may share "
        "it. Empty: each router process keeps its own in memory, and a restart loses them.",
    )
    max_responses_bytes: int = option(
        ROUTER,
        64 * 2**20,
        "Bytes of stored responses, in responses_dir or in a router process's memory. Beyond that, the oldest of the "
        "tenant that has most are dropped. 0: none are stored.",
        ge=0,
        le=2**40,
    )
    batches_dir: str = option(
        ROUTER,
        "",
        "Directory for files and batches, /v1/files and /v1/batches, which then work. Routers may share it: each batch "
        "is run by one of them, and by another one when that one dies. Empty: there are none.",
    )
    max_files_bytes: int = option(
        ROUTER,
        8 * 2**30,
        "Bytes of files in batches_dir. A tenant gets at most as many as are free, times its weight. Beyond that, "
        "files are refused, and a batch whose output grows beyond it fails.",
        ge=2**20,
        le=2**50,
    )
    batch_concurrency: int = option(
        ROUTER,
        32,
        "Requests of batches that a router process computes at once. Their priority is behind that of all others.",
        ge=1,
        le=4096,
    )
    trust_request_chat_template: bool = option(
        ROUTER,
        False,
        "Render chats with a template that comes with the request, if there is one (chat_template). Only for clients "
        "that are trusted: the time of such a template is bounded, its memory is not. Otherwise it is refused.",
    )
    tool_call_parser: ToolCallParser = option(
        ROUTER,
        "auto",
        "Format in which the model writes tool calls, by vLLM's name. auto: guessed from its chat template. none: "
        "calls stay text.",
    )
    reasoning_parser: ReasoningParser = option(
        ROUTER,
        "auto",
        "Format in which the model writes its reasoning. auto: guessed from its chat template. none: it stays text.",
    )
    stream_buffer_bytes: int = option(
        ROUTER,
        4 * 2**20,
        "Bytes to buffer for a client that reads slowly; beyond that, its stream ends with RESOURCE_EXHAUSTED.",
        ge=4096,
        le=2**30,
    )
    detach_timeout: float = option(
        ROUTER,
        0.0,
        "Seconds for which a request goes on after the connection of its reader has broken, so that a client may "
        "attach and read the rest; a request may say another number. 0: it ends with its connection.",
        ge=0,
        le=3600,
    )
    max_detached_streams: int = option(
        ROUTER,
        256,
        "Streams without a reader that a router process holds for one tenant, each with up to stream_buffer_bytes of "
        "output; those that have ended and could be attached to count. Beyond that, a stream ends with its connection. "
        "0: none.",
        ge=0,
        le=2**20,
    )
    max_streams: int = option(
        ROUTER,
        16_384,
        "Requests that a router process holds at once, from their arrival to their end; more are refused with "
        "RESOURCE_EXHAUSTED.",
        ge=1,
        le=2**20,
    )
    max_connections: int = option(
        ROUTER,
        16_384,
        "HTTP connections of a router process at once, and as many of gRPC; at most three quarters of the open files "
        "that the system allows. A new HTTP connection then gets the place of one that waits for its client, of the "
        "address that has the most of these; a new gRPC connection is closed.",
        ge=16,
        le=2**20,
    )
    max_streams_per_key: int = option(
        ROUTER,
        0,
        "Requests of one API key that a router process holds at once, unless the key's entry in api_keys_file has "
        "max_streams; more are refused with RESOURCE_EXHAUSTED. 0: no bound but max_streams.",
        ge=0,
        le=2**20,
    )
    max_tokenizing_bytes: int = option(
        ROUTER,
        64 * 2**20,
        "Bytes of text that may wait for the tokenizer in a router process. A caller (tenant, or connection if there "
        "are no keys) gets at most as many as are free: one alone half of them, two a third each. Beyond that, calls "
        "are refused with RESOURCE_EXHAUSTED. One text alone may be longer.",
        ge=65_536,
        le=2**36,
    )
    constraint_compile_timeout: float = option(
        ROUTER,
        2.0,
        "Seconds of CPU time that a router may take to compile what a request's output must be: a JSON schema, regular "
        "expression or grammar. Beyond that, the request is refused with INVALID_ARGUMENT.",
        ge=0.05,
        le=60,
    )
    replica_stall_timeout: float = option(
        ROUTER,
        360.0,
        "Seconds after which a replica that has work but completes no step counts as stalled: requests go elsewhere "
        "until it makes progress. Keep it above step_timeout, after which its scheduler gives up the step. 0: off.",
        ge=0,
        le=86_400,
    )
    slow_replica_factor: float = option(
        ROUTER,
        3.0,
        "A replica whose steps take this many times as long as those of the others, size for size, gets fewer "
        "requests. With two replicas the bound is twice as high. 0: off.",
        ge=0,
        le=1000,
    )
    slow_replica_handover_factor: float = option(
        ROUTER,
        6.0,
        "A replica that is slower by this factor gets no requests for a while (30 s, then twice as long each time, up "
        "to 300 s), and its streams move to others. With two replicas the bound is twice as high. 0: never.",
        ge=0,
        le=1000,
    )
    slow_replica_max_share: float = option(
        ROUTER,
        0.34,
        "Largest share of the replicas that may be treated as slow at once; always at least one replica.",
        ge=0,
        le=0.5,
    )
    slow_replica_window: float = option(
        ROUTER,
        10.0,
        "Seconds over which the times of a replica's steps are compared. A slow replica is left out for 3 windows at "
        "first, for 30 at most.",
        ge=0.1,
        le=3600,
    )
    drain_timeout: float = option(
        ROUTER, 30.0, "Seconds that running requests get to finish on SIGTERM or Ctrl-C.", ge=0, le=86_400
    )

    @property
    def num_router_processes(self) -> int:
        """The number of processes of all routers."""
        return self.num_routers * self.api_server_count

    def router_port(self, router: int) -> int:
        """The port of a router's gRPC server; 0: any free one."""
        return self.port + router if self.port else 0

    def router_http_port(self, router: int) -> int:
        """The port of a router's HTTP server; 0: it has none."""
        return self.http_port + router if self.http_port else 0

    def _check_routers(self) -> None:
        """Raises ValueError."""
        for name in self.allowed_hosts:
            if not _HOST.fullmatch(name):
                raise ValueError(
                    f"allowed_hosts: {name!r} is no host: use names without scheme and port, such as "
                    f"octavo.example.com, .example.com for all below it, or * for any"
                )
        slow, handover = self.slow_replica_factor, self.slow_replica_handover_factor
        if 0 < slow <= 1:
            raise ValueError(f"slow_replica_factor={slow:g}: use a factor above 1, or 0 to treat no replica as slow")
        if slow and handover and handover < slow:
            raise ValueError(
                f"slow_replica_handover_factor={handover:g} is below slow_replica_factor={slow:g}: use at least as "
                "much, or 0 to move no streams"
            )
        if self.detach_timeout and not self.max_detached_streams:
            raise ValueError(
                f"detach_timeout={self.detach_timeout:g} with max_detached_streams=0: allow some, or use 0 for both"
            )
        if self.reasoning_parser == "openai_gptoss" and self.tool_call_parser not in ("auto", "none", "openai"):
            raise ValueError(
                f"reasoning_parser=openai_gptoss with tool_call_parser={self.tool_call_parser}: harmony has calls of "
                "its own, use tool_call_parser=openai"
            )
        for name in ("port", "http_port"):
            first: int = getattr(self, name)
            if first and first + self.num_routers > 65_536:
                raise ValueError(
                    f"{name}={first}: num_routers={self.num_routers} take as many ports from there; use "
                    f"{65_536 - self.num_routers} or less"
                )
        if self.port and self.http_port and abs(self.port - self.http_port) < self.num_routers:
            raise ValueError(
                f"port={self.port} and http_port={self.http_port}: each of num_routers={self.num_routers} takes the "
                f"next port after these; keep them {self.num_routers} or more apart"
            )
