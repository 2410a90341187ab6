"""A router that answers every prompt with three tokens, and is ready at once."""

from collections.abc import Iterator
from concurrent import futures

import grpc
from common import start, wait_until_told_to_end
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as rpc

ANSWER = ("Paris", ", of", " course")


class Inference(rpc.InferenceServicer):
    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        sampling = pb.SamplingParams(n=1, seed=1)
        count = request.sampling.max_tokens if request.sampling.ignore_eos else len(ANSWER)
        yield pb.GenerateResponse(
            started=pb.Started(request_id=request.request_id, seed=1, sampling=sampling, prompt_token_ids=[1, 2])
        )
        for position in range(count):
            last = position == count - 1
            finish = pb.Finish(reason=pb.FINISH_REASON_STOP) if last else None
            text = ANSWER[position % len(ANSWER)]
            yield pb.GenerateResponse(
                chunk=pb.Chunk(first_token=position, token_ids=[position], text=text, exact=True, finish=finish)
            )
        usage = pb.Usage(prompt_tokens=2, cached_tokens=1, completion_tokens=count)
        yield pb.GenerateResponse(finished=pb.Finished(usage=usage))

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.ModelInfo:
        if request.model not in ("", "fake"):
            context.abort(grpc.StatusCode.NOT_FOUND, f"model={request.model!r} is not served here; 'fake' is")
        return pb.ModelInfo(name="fake", dtype="float32", max_model_len=64, vocab_size=100)


def main() -> None:
    options, flags = start("router")
    shares_port = flags.process is not None
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", int(shares_port))])
    rpc.add_InferenceServicer_to_server(Inference(), server)
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    servicer.set("octavo.v1.Inference", health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(f"{options.host}:{options.router_port(flags.router)}")
    server.start()
    wait_until_told_to_end("router")
    server.stop(None).wait()


main()
