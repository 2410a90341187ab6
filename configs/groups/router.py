"""The options of the router: where it listens, where its requests go, and what it bears."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator

from configs.groups.field import ROUTER, option, split_commas

Compat = Annotated[tuple[Literal["vllm", "kserve"], ...], BeforeValidator(split_commas)]


class RouterOptions(BaseModel):
    """Validated with the others, in configs.options."""

    host: str = option(ROUTER, "127.0.0.1", "Address the router's gRPC server binds to.")
    port: int = option(ROUTER, 50051, "Port of the router's gRPC server. 0: any free one.", ge=0, le=65_535)
    http_port: int = option(
        ROUTER,
        8000,
        "Port, at the same address, of the router's HTTP server: /v1/completions, /v1/chat/completions and /v1/models "
        "as OpenAI's clients call them. 0: none.",
        ge=0,
        le=65_535,
    )
    num_routers: int = option(
        ROUTER,
        1,
        "Routers that `octavo up` starts over the same schedulers, each at addresses of its own: the next one's port "
        "and http_port are one higher. Clients that know several go on through another one when theirs dies.",
        ge=1,
        le=64,
    )
    api_server_count: int = option(
        ROUTER,
        1,
        "Processes of each router that `octavo up` starts: they share its port and http_port (SO_REUSEPORT), and the "
        "system deals connections out to them. Each computes on one core. What bounds a router, and limits of API "
        "keys, hold for each process.",
        ge=1,
        le=64,
    )
    compat: Compat = option(
        ROUTER,
        (),
        "Other projects' gRPC services that the router serves, too, comma-separated. vllm: VllmEngine, by which the "
        "SMG gateway reaches an engine; needs octavo[smg]. kserve: GRPCInferenceService, for Triton's clients.",
    )
    routing_policy: Literal["least_loaded", "round_robin", "power_of_two", "prefix_aware", "consistent_hash"] = option(
        ROUTER,
        "least_loaded",
        "Where a request goes. least_loaded: to the replica with the fewest tokens to compute. round_robin: to each in "
        "turn. power_of_two: to the less loaded of two random ones. prefix_aware: to where the first token can come "
        "soonest, by its queue and by what of the prompt it has in its prefix cache. consistent_hash: always to the "
        "same one for a session_key, unless it is overloaded.",
    )
    max_message_bytes: int = option(
        ROUTER, 64 * 2**20, "Largest message the router takes from a client.", ge=65_536, le=2**30
    )
    stream_buffer_bytes: int = option(
        ROUTER,
        4 * 2**20,
        "Bytes buffered for a client that reads slowly before its stream ends with RESOURCE_EXHAUSTED.",
        ge=4096,
        le=2**30,
    )
    max_streams: int = option(
        ROUTER,
        16_384,
        "Requests that a router process holds at once, from their arrival to their last word; more are "
        "RESOURCE_EXHAUSTED.",
        ge=1,
        le=2**20,
    )
    max_tokenizing_bytes: int = option(
        ROUTER,
        64 * 2**20,
        "Text that may wait in a router process for its tokenizer; with more, what comes is RESOURCE_EXHAUSTED. One "
        "prompt alone may be longer.",
        ge=65_536,
        le=2**36,
    )
    replica_stall_timeout: float = option(
        ROUTER,
        360.0,
        "Seconds after which a replica that has something to run and completes no step counts as stalled: requests go "
        "elsewhere until it gets on again. Above step_timeout, after which its scheduler gives the step up. 0: off.",
        ge=0,
        le=86_400,
    )
    drain_timeout: float = option(
        ROUTER, 30.0, "Seconds that running requests get to finish on SIGTERM or Ctrl-C.", ge=0, le=86_400
    )

    @property
    def num_router_processes(self) -> int:
        """Of all routers."""
        return self.num_routers * self.api_server_count

    def router_port(self, router: int) -> int:
        """Of a router's gRPC server; 0: any free one."""
        return self.port + router if self.port else 0

    def router_http_port(self, router: int) -> int:
        """Of a router's HTTP server; 0: it has none."""
        return self.http_port + router if self.http_port else 0

    def _check_routers(self) -> None:
        """Raises ValueError."""
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
