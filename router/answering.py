"""How every gRPC service of the router ends a call that raises."""

import contextlib
import logging
from collections.abc import AsyncIterator

import grpc.aio

from router.errors import RequestError, status_of
from router.status_details import trailing_metadata
from router.telemetry.incoming import log_fields

log = logging.getLogger("octavo.router.service")


@contextlib.asynccontextmanager
async def answering(context: grpc.aio.ServicerContext, request_id: str = "") -> AsyncIterator[None]:
    """Ends the call with the status of what is raised inside. request_id: for the log."""
    try:
        yield
    except RequestError as error:
        log.debug("ended: %s", error, extra=log_fields(request_id))
        code, message = status_of(error)
        await context.abort(code, message, trailing_metadata(error, code, message))
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        if isinstance(error, grpc.aio.InternalError) and context.done():
            # Of a write to a client that has gone.
            log.debug("the client has gone: %s", error, extra=log_fields(request_id))
            return
        log.exception("failed", extra=log_fields(request_id))
        await context.abort(*status_of(error))
