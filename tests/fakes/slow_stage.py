"""Pipeline stages that take time but no CPU core: real workers in threads of this process, connected by gloo."""

import os
import secrets
import threading
import time
from collections.abc import Callable

import torch
import zmq

from configs.options import Options
from kernels.backend import torch_backend
from kernels.sampling import TokenMasks
from protos import inference_pb2, step_pb2
from runtime.wire import PROTOCOL_VERSION, heartbeat_endpoint, octavo_version
from tests.fakes.fake_model import VOCAB_SIZE, fake_config
from worker.cpu.executor import CpuExecutor
from worker.cpu.runner import Runner
from worker.cpu.threaded_runner import ThreadedRunner
from worker.layers.kv_cache import KVCache
from worker.parallel.axes import axes_of
from worker.parallel.group_init import connect_ranks
from worker.parallel.groups import Groups, without_others
from worker.process.link import Link, Wakeup
from worker.process.loop import WorkerLoop
from worker.process.status import HeartbeatThread, WorkerMetrics, WorkerStatus
from worker.step.batch import InputBatch
from worker.step.rows import Rows

_NUM_BLOCKS, _MAX_MODEL_LEN = 256, 256


class SlowStage(CpuExecutor):
    """An executor whose steps take `seconds` each. It records when they began and ended. Its output
    tokens are positions."""

    backend = torch_backend(torch.float32)
    groups = Groups()
    hidden_size = 2

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # (begin, end) of each step, from time.perf_counter.
        self.steps: list[tuple[float, float]] = []

    def incoming(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens, self.hidden_size)

    def forward(self, batch: InputBatch, kv_cache: KVCache) -> torch.Tensor:
        self._take_a_while()
        return torch.zeros(batch.num_tokens, self.hidden_size)

    def wanted(self, batch: InputBatch, kv_cache: KVCache) -> torch.Tensor:
        return self.forward(batch, kv_cache)[batch.logit_indices]

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        raise AssertionError("requests are greedy")

    def greedy(self, batch: InputBatch, kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        self._take_a_while()
        return batch.positions_T[batch.logit_indices] % VOCAB_SIZE, torch.zeros(batch.num_logits)

    def masked_greedy(
        self, batch: InputBatch, kv_cache: KVCache, masks: Callable[[], TokenMasks]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("requests have no constraint")

    def _take_a_while(self) -> None:
        began = time.perf_counter()
        time.sleep(self._seconds)
        self.steps.append((began, time.perf_counter()))


class SlowStageWorker:
    """A rank in a thread of this process."""

    def __init__(self, options: Options, rank: int, model: SlowStage) -> None:
        self._options, self._rank, self._model = options, rank, model
        self._wakeup, self._context = Wakeup(), zmq.Context()
        status, instance, endpoint = WorkerStatus(), secrets.randbits(63), options.step_address(0)
        self._link = Link(self._context, endpoint, None, timeout=options.heartbeat_timeout)
        self._heartbeat = HeartbeatThread(
            self._context,
            heartbeat_endpoint(endpoint),
            None,
            status,
            rank=rank,
            instance=instance,
            timeout=options.heartbeat_timeout,
            on_loss=self._wakeup.notify,
        )
        axes = axes_of(options)
        self._loop = WorkerLoop(
            hello=self._hello(instance),
            link=self._link,
            heartbeat=self._heartbeat,
            status=status,
            wakeup=self._wakeup,
            metrics=WorkerMetrics(status.snapshot),
            build=lambda progress: self._build(),
            connect=lambda address, while_waiting: connect_ranks(
                address, axes, rank, call_timeout=options.step_timeout, while_waiting=while_waiting
            ),
            returns_results=axes.returns_results(rank),
        )
        self._thread = threading.Thread(target=self._run, name=f"slow-stage-{rank}", daemon=True)

    def start(self) -> None:
        self._heartbeat.start()
        self._thread.start()

    def stop(self) -> None:
        self._wakeup.request_stop()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the worker does not end"
        self._wakeup.close()

    def _hello(self, instance: int) -> step_pb2.Hello:
        options = self._options
        return step_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            octavo_version=octavo_version(),
            rank=self._rank,
            world_size=options.world_size,
            model=options.served_model_name,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            pid=os.getpid(),
            instance=instance,
        )

    def _build(self) -> ThreadedRunner:
        options, config = self._options, fake_config()
        rows = Rows(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=_MAX_MODEL_LEN,
            block_size=options.block_size,
            num_blocks=_NUM_BLOCKS,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=config.eos_token_ids,
        )
        info = inference_pb2.ModelInfo(
            name=options.served_model_name,
            max_model_len=_MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            block_size=options.block_size,
            num_blocks=_NUM_BLOCKS,
            fingerprint="slow",
        )
        cache = KVCache(config, num_blocks=_NUM_BLOCKS + 1, block_size=options.block_size, backend=self._model.backend)
        runner = Runner(
            self._model,
            cache,
            rows,
            info,
            max_steps_in_flight=options.max_steps_in_flight,
            without_others=without_others(axes_of(options), self._rank),
        )
        return ThreadedRunner(runner, max_steps_in_flight=options.max_steps_in_flight)

    def _run(self) -> None:
        self._loop.run()
        self._heartbeat.stop()
        self._link.close(deliver=False)
        self._context.term()
