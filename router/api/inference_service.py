"""The Inference service: turns a client's message into a stream, and the stream's events into messages."""

import contextlib
import uuid
from collections.abc import AsyncIterator

import grpc.aio

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceServicer
from router.api.grpc_errors import grpc_errors, guarded
from router.api.whole_messages import MESSAGE_BYTES, WholeResult, write_whole, writes_answer
from router.intake.attach.attachments import Attachments
from router.intake.attach.transcript import Reader
from router.intake.intake import Intake
from router.request.checks import check_request_id
from router.request.values import check_model_name
from router.streams.outbox import Outbox, bounded_reading
from router.streams.stream import Stream

Context = grpc.aio.ServicerContext


class InferenceService(InferenceServicer):
    """One code path for both calls: GenerateUnary collects what Generate streams."""

    def __init__(self, intake: Intake, attachments: Attachments) -> None:
        self._intake, self._attachments = intake, attachments

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        opened = self._opened(request, context)
        del request
        async with opened as (_, reader):
            await _pass_on(reader, context)

    @writes_answer
    async def GenerateUnary(self, request: pb.GenerateRequest, context: Context) -> None:
        answers, longest, sampling = self._intake.answers, self._intake.max_model_len, request.sampling
        async with grpc_errors(context, request.request_id):
            # Refused here, and not once it has been computed.
            room = answers.begin((sampling,), longest, MESSAGE_BYTES, is_message=True)
        opened = self._opened(request, context)
        del request, sampling
        try:
            async with opened as (stream, reader):
                if isinstance(reader, Outbox):
                    reader.collect()
                result = WholeResult(stream.request.sampling.n, room)
                while events := await reader.take():
                    for event in events:
                        result.add(event)
            await write_whole(result.take_parts(), context)
        finally:
            room.close()

    @guarded
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        check_model_name(request.model, self._intake.model_name)
        token_ids = await self._intake.tokenize(request)
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=self._intake.max_model_len)

    @guarded
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        check_model_name(request.model, self._intake.model_name)
        text = await self._intake.detokenize(request)
        return pb.DetokenizeResponse(text=text)

    @guarded
    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.ModelInfo:
        check_model_name(request.model, self._intake.model_name)
        return self._intake.model

    @guarded
    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        # Every replica is asked for an id that this router does not know.
        check_request_id(request.request_id)
        return await self._intake.live.cancel(request.request_id)

    async def Attach(self, request: pb.AttachRequest, context: Context) -> None:
        async with (
            grpc_errors(context, request.request_id),
            contextlib.aclosing(self._attachments.attach(request)) as events,
        ):
            async for event in events:
                await context.write(event)

    @contextlib.asynccontextmanager
    async def _opened(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[tuple[Stream, Outbox | Reader[pb.GenerateResponse]]]:
        request.request_id = request.request_id or uuid.uuid4().hex
        async with grpc_errors(context, request.request_id):
            timeout = self._attachments.timeout_of(request)
            opening = (
                self._attachments.begin(request, timeout)
                if timeout
                else _with_outbox(self._intake.open(request, context.time_remaining()))
            )
            # It may be large, and the stream may last.
            del request
            async with opening as (stream, reader):
                with bounded_reading(reader):
                    yield stream, reader


@contextlib.asynccontextmanager
async def _with_outbox(opening: contextlib.AbstractAsyncContextManager[Stream]) -> AsyncIterator[tuple[Stream, Outbox]]:
    async with opening as stream:
        yield stream, stream.outbox


async def _pass_on(reader: Outbox | Reader[pb.GenerateResponse], context: Context) -> None:
    while events := await reader.take():
        for event in events:
            await context.write(event)
