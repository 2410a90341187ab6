"""The GRPCInferenceService: converts its messages for the intake, and back."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from importlib.metadata import version

import grpc.aio

from protos import inference_pb2 as octavo
from protos import kserve_pb2 as pb
from protos.kserve_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server
from router.api.compat.kserve.convert import INPUTS, OUTPUT, VERSION, Infer, read
from router.api.gateway.openai.reply import finish_of
from router.api.grpc_errors import grpc_errors
from router.errors import InvalidRequest, RequestError, status_of
from router.intake.intake import Intake
from router.replicas.replica_set import ReplicaSet
from router.request.values import check_model_name
from router.security.held import release
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
            check_model_name(request.name, self._intake.model_name)
            answer = pb.ModelMetadataResponse(name=self._intake.model_name, versions=[VERSION], platform="octavo")
            for name, datatype in INPUTS.items():
                answer.inputs.add(name=name, datatype=datatype, shape=[1])
            answer.outputs.add(name=OUTPUT, datatype="BYTES", shape=[-1])
            return answer
        raise AssertionError("unreachable")

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        async with grpc_errors(context):
            infer, message = read(request, self._intake.model_name)
            # It may be large, and the stream may last.
            del request
            if infer.stream:
                raise InvalidRequest("stream=true: call ModelStreamInfer, or leave it out")
            answering = contextlib.aclosing(self._responses(infer, [message], context.time_remaining()))
            del message
            async with answering as responses:
                [response] = [response async for response in responses]
            return response
        raise AssertionError("unreachable")

    async def ModelStreamInfer(self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:
        """Reports an error that ends one request in its response; the others continue."""
        writing = asyncio.Lock()
        free = asyncio.Semaphore(_MOST_AT_ONCE)

        async def answer(asked: list[pb.ModelInferRequest]) -> None:
            # A request may be large: only this part of it is held while it is answered.
            request_id, model_name = asked[0].id, asked[0].model_name
            try:
                infer, message = read(asked.pop(), self._intake.model_name)
                answering = contextlib.aclosing(self._responses(infer, [message], context.time_remaining()))
                del message
                async with answering as responses:
                    async for response in responses:
                        async with writing:
                            await context.write(pb.ModelStreamInferResponse(infer_response=response))
            except RequestError as error:
                await tell(request_id, model_name, error)
            except Exception as error:
                log.exception("failed", extra=log_fields(request_id))
                await tell(request_id, model_name, error)
            finally:
                # Refused, or it has ended: the next message of this call may have its share.
                release()
                free.release()

        async def tell(request_id: str, model_name: str, error: Exception) -> None:
            status, message = status_of(error)
            if isinstance(error, RequestError) and error.retry_after_s is not None:
                # The message is the only place for the delay: no status with details is sent.
                message += f" (in {error.retry_after_s:.1f} s)"
            failed = pb.ModelInferResponse(model_name=model_name, id=request_id)
            response = pb.ModelStreamInferResponse(error_message=f"{status.name}: {message}", infer_response=failed)
            async with writing:
                with bounded_write():
                    await context.write(response)

        async with grpc_errors(context):
            unreadable: RequestError | None = None
            async with asyncio.TaskGroup() as group:
                try:
                    async for request in request_iterator:
                        asked = [request]
                        del request
                        await free.acquire()
                        group.create_task(answer(asked))
                        del asked
                except RequestError as error:
                    # A message that could not be taken, so that it has no id: the requests before it continue.
                    unreadable = error
            if unreadable is not None:
                raise unreadable

    @property
    def _ready(self) -> bool:
        return self._replicas.num_ready > 0 and not self._intake.draining

    async def _responses(
        self, infer: Infer, messages: list[octavo.GenerateRequest], seconds: float | None
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """messages: one alone, which is taken out. Raises RequestError."""
        message = messages.pop()
        first = message.prompt if infer.prepends_input else ""
        texts = [[first] for _ in range(max(message.sampling.n, 1))]
        opening = self._intake.open(message, seconds)
        del message
        async with opening as stream:
            with bounded_reading(stream.outbox):
                while events := await stream.outbox.take():
                    for event in events:
                        if not event.HasField("chunk"):
                            continue
                        chunk = event.chunk
                        final = finish_of(chunk) is not None
                        if not infer.stream:
                            texts[chunk.index].append(chunk.text)
                        elif chunk.text or final:
                            yield infer.response([chunk.text], final=final)
        if not infer.stream:
            yield infer.response(list(map("".join, texts)), final=True)
