"""The GRPCInferenceService: converts its messages for the intake, and back."""

import asyncio
import logging
from collections.abc import AsyncIterator
from importlib.metadata import version

import grpc.aio

from protos import kserve_pb2 as pb
from protos.kserve_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server
from router.api.compat.kserve.convert import INPUTS, OUTPUT, VERSION, Infer, read
from router.api.gateway.openai.reply import finish_of
from router.api.grpc_errors import grpc_errors
from router.errors import InvalidRequest, RequestError, status_of
from router.intake import validation
from router.intake.intake import Intake
from router.replicas.replica_set import ReplicaSet
from router.streams.outbox import bounded_reading, bounded_write
from router.telemetry.call_context import log_fields

log = logging.getLogger("octavo.router.kserve")

# Requests of one streamed call that are under way at once; the next is read when one of them ends.
_MOST_AT_ONCE = 256

Context = grpc.aio.ServicerContext


def add_to_server(server: grpc.aio.Server, intake: Intake, replicas: ReplicaSet) -> str:
    """Registers the service and returns its full name."""
    add_GRPCInferenceServiceServicer_to_server(KserveService(intake, replicas), server)
    return pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name


class KserveService(GRPCInferenceServiceServicer):
    """The served model, with the tensors of Triton's vLLM backend."""

    def __init__(self, intake: Intake, replicas: ReplicaSet) -> None:
        self._intake, self._replicas = intake, replicas

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        served = request.name in ("", self._intake.model_name) and request.version in ("", VERSION)
        return pb.ModelReadyResponse(ready=served and self._ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="octavo", version=version("octavo"))

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        async with grpc_errors(context):
            validation.check_model_name(request.name, self._intake.model_name)
            answer = pb.ModelMetadataResponse(name=self._intake.model_name, versions=[VERSION], platform="octavo")
            for name, datatype in INPUTS.items():
                answer.inputs.add(name=name, datatype=datatype, shape=[1])
            answer.outputs.add(name=OUTPUT, datatype="BYTES", shape=[-1])
            return answer
        raise AssertionError("unreachable")

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        async with grpc_errors(context):
            infer = read(request, self._intake.model_name)
            if infer.stream:
                raise InvalidRequest("stream=true: call ModelStreamInfer, or leave it out")
            [response] = [response async for response in self._responses(infer, context.time_remaining())]
            return response
        raise AssertionError("unreachable")

    async def ModelStreamInfer(self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:
        """Reports an error that ends one request in its response; the others continue."""
        writing = asyncio.Lock()
        free = asyncio.Semaphore(_MOST_AT_ONCE)

        async def answer(request: pb.ModelInferRequest) -> None:
            try:
                async for response in self._responses(read(request, self._intake.model_name), context.time_remaining()):
                    async with writing:
                        await context.write(pb.ModelStreamInferResponse(infer_response=response))
            except RequestError as error:
                await tell(request, error)
            except Exception as error:
                log.exception("failed", extra=log_fields(request.id))
                await tell(request, error)
            finally:
                free.release()

        async def tell(request: pb.ModelInferRequest, error: Exception) -> None:
            status, message = status_of(error)
            if isinstance(error, RequestError) and error.retry_after_s is not None:
                # The message is the only place for the delay: no status with details is sent.
                message += f" (in {error.retry_after_s:.1f} s)"
            failed = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
            response = pb.ModelStreamInferResponse(error_message=f"{status.name}: {message}", infer_response=failed)
            async with writing:
                with bounded_write():
                    await context.write(response)

        async with grpc_errors(context), asyncio.TaskGroup() as group:
            async for request in request_iterator:
                await free.acquire()
                group.create_task(answer(request))

    @property
    def _ready(self) -> bool:
        return self._replicas.num_ready > 0 and not self._intake.draining

    async def _responses(self, infer: Infer, seconds: float | None) -> AsyncIterator[pb.ModelInferResponse]:
        """Raises RequestError."""
        texts: list[str] = [infer.message.prompt if infer.prepends_input else ""] * max(infer.message.sampling.n, 1)
        async with self._intake.open(infer.message, seconds) as stream:
            with bounded_reading(stream.outbox):
                while events := await stream.outbox.take():
                    for event in events:
                        if not event.HasField("chunk"):
                            continue
                        chunk = event.chunk
                        final = finish_of(chunk) is not None
                        if not infer.stream:
                            texts[chunk.index] += chunk.text
                        elif chunk.text or final:
                            yield infer.response([chunk.text], final=final)
        if not infer.stream:
            yield infer.response(texts, final=True)
