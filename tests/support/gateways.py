"""HTTP in front of a router of fake schedulers, in the test's own event loop."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from router.api.gateway.app import Gateway
from router.api.gateway.server import GatewayServer
from router.text.tokenizer import Tokenizer
from tests.fakes.routers import running_router
from tests.fakes.scheduler import FakeScheduler


@contextlib.asynccontextmanager
async def running_gateway(
    scheduler: FakeScheduler, tokenizer: Tokenizer | None = None, **options: Any
) -> AsyncIterator[str]:
    """Yields the URL. tokenizer: SmolLM2's if None. options: the router's."""
    async with running_router([scheduler.address], tokenizer=tokenizer, **options) as (server, _):
        await server.wait_ready()
        gateway = Gateway(
            server.intake, server.registry, server.readiness, max_body_bytes=2**20, attachments=server.attachments
        )
        serving = GatewayServer(gateway, "127.0.0.1", 0)
        serving.start()
        yield f"http://127.0.0.1:{serving.port}"
        await serving.stop()
