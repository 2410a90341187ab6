"""An LLM's workers in processes of their own: several ranks or replicas, behind a router that this program calls."""

import asyncio
from collections.abc import Sequence

from configs.options import Options
from octavo.client.async_client import AsyncClient
from octavo.client.results import Generation
from octavo.cluster.errors import ClusterError
from octavo.local.own_cluster import OwnCluster
from octavo.local.running import Asked
from runtime.model_files import resolve_model

# Requests sent ahead of those that run, for each row: enough that rows never wait for a request.
_REQUESTS_A_ROW = 2


class Workers:
    """Computes in a cluster of its own. A worker that dies is started again, and its requests go on."""

    def __init__(self, options: Options) -> None:
        """Returns once all serve. Raises ModelNotFoundError, ClusterError."""
        # At once, and not as the last words of a worker.
        resolve_model(options.model)
        self._cluster = OwnCluster(options)
        # Belongs to the cluster's own event loop, in which all is computed.
        self._failure: asyncio.Future[ClusterError] | None = None
        self._most_at_once = _REQUESTS_A_ROW * options.max_num_seqs * options.data_parallel_size

    @property
    def num_preemptions(self) -> int:
        return self._cluster.num_preemptions

    @property
    def pids(self) -> dict[str, int]:
        """The process ids by name, such as "worker 0.1"."""
        return self._cluster.pids

    def compute(self, asked: Sequence[Asked]) -> list[Generation]:
        """The first error of a request ends all. Raises ClusterError once the cluster can't go on."""
        return self._cluster.run(lambda: self._compute(asked))

    async def _compute(self, asked: Sequence[Asked]) -> list[Generation]:
        computing = asyncio.create_task(self._compute_all(asked))
        if self._failure is None:
            self._failure = asyncio.wrap_future(self._cluster.failure)
        try:
            await asyncio.wait({computing, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            return await computing
        finally:
            computing.cancel()
            await asyncio.wait({computing})

    async def _compute_all(self, asked: Sequence[Asked]) -> list[Generation]:
        room = asyncio.Semaphore(self._most_at_once)

        async def one(each: Asked) -> Generation:
            prompt, sampling, options = each
            async with room:
                return await client.generate(prompt, sampling, **options)

        async with AsyncClient(self._cluster.targets) as client:
            tasks = [asyncio.create_task(one(each)) for each in asked]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self._cluster.close()
