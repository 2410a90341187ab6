"""All edges, in the order in which they are fuzzed."""

from benchmarks.fuzz.edge import Kind
from benchmarks.fuzz.edges.batch_lines import batch_lines
from benchmarks.fuzz.edges.client_grpc import inference, kserve_edge, sglang_edge, vllm_edge, vllm_own_edge
from benchmarks.fuzz.edges.client_http import http
from benchmarks.fuzz.edges.constraints import constraints
from benchmarks.fuzz.edges.coordination import coordination
from benchmarks.fuzz.edges.elements import ELEMENTS_MIB, elements_edge
from benchmarks.fuzz.edges.framing import router_framing
from benchmarks.fuzz.edges.items import items
from benchmarks.fuzz.edges.raw import CALLS_MIB
from benchmarks.fuzz.edges.session import to_router, to_scheduler
from benchmarks.fuzz.edges.sockets import curve, metrics, router_grpc, router_http, router_methods, scheduler_methods
from benchmarks.fuzz.edges.step import plans, ranks, results

_ALL = (
    Kind(name="inference", reads="router: octavo.v1.Inference of gRPC clients", opened=inference),
    Kind(name="kserve", reads="router: GRPCInferenceService of Triton's clients", opened=kserve_edge),
    Kind(name="vllm", reads="router: VllmEngine of the SMG gateway", opened=vllm_edge),
    Kind(name="vllm-inference", reads="router: vLLM's own vllm.Inference", opened=vllm_own_edge),
    Kind(name="sglang", reads="router: SglangScheduler of SGLang's routers", opened=sglang_edge),
    Kind(
        name="elements",
        reads="router: as many elements as 16 MiB have room for",
        opened=elements_edge,
        largest_mib=ELEMENTS_MIB,
        most_held_s=0.05,
        # 378 MiB after 500 messages, 393 after 1,000, 414 after 2,000.
        kept_mib=64,
    ),
    Kind(name="http", reads="router: OpenAI's HTTP, from the headers on", opened=http),
    Kind(name="batch-lines", reads="router and run-batch: files of batches", opened=batch_lines),
    Kind(
        name="constraints",
        reads="router: schemas, regular expressions, grammars, tags",
        opened=constraints,
    ),
    Kind(name="items", reads="router and worker: images of clients", opened=items),
    Kind(name="session-scheduler", reads="scheduler: a Session's RouterMessage", opened=to_scheduler),
    Kind(name="session-router", reads="router: a Session's SchedulerMessage", opened=to_router),
    Kind(name="step-result", reads="scheduler: a rank's StepResult", opened=results),
    Kind(name="step-plan", reads="worker: a StepPlan", opened=plans),
    Kind(name="step-socket", reads="scheduler: ZeroMQ frames of anybody, and heartbeats", opened=ranks),
    Kind(name="coordination", reads="schedulers: ReplicaState and GroupState", opened=coordination),
    Kind(
        name="router-methods",
        reads="router: any bytes to every gRPC method, gzip too",
        opened=router_methods,
        largest_mib=CALLS_MIB,
    ),
    Kind(
        name="scheduler-methods",
        reads="scheduler: the same",
        opened=scheduler_methods,
        largest_mib=CALLS_MIB,
    ),
    Kind(name="router-grpc-port", reads="router: HTTP/2", opened=router_grpc),
    Kind(name="router-http-port", reads="router: HTTP/1.1", opened=router_http),
    Kind(
        name="router-http-framing",
        reads="router: HTTP/1.1 in as many pieces as have room",
        opened=router_framing,
        most_held_s=0.05,
    ),
    Kind(name="metrics-port", reads="every process: /metrics and /health", opened=metrics),
    Kind(name="curve-port", reads="scheduler: ZeroMQ over tcp, with CURVE", opened=curve),
)
KINDS = {kind.name: kind for kind in _ALL}
