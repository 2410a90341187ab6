"""Recordings of cores under random loads."""

from pathlib import Path
from random import Random

from scheduler.core.core import Core
from scheduler.core.messages import CoreSettings
from scheduler.recording.file import RecordingWriter
from scheduler.recording.recorded_core import RecordedCore
from tests.properties.workloads import Workload
from tests.properties.world import World

_MIB = 1 << 20


def recorded(writer: RecordingWriter) -> type[Core]:
    """Cores that the writer records."""

    class Recorded(RecordedCore):
        def __init__(self, settings: CoreSettings) -> None:
            super().__init__(settings, writer)

    return Recorded


def record(path: Path, *, num_requests: int = 12, max_bytes: int = _MIB, **settings: object) -> World:
    """Records some requests from the first to the last token and closes the recording."""
    writer = RecordingWriter(path, max_bytes, 0)
    small = {"block_size": 4, "num_blocks": 12, "max_model_len": 40, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    world = World(CoreSettings(**(small | settings)), core_class=recorded(writer))  # type: ignore[arg-type]
    choose = Random(1)
    load = Workload(
        most_tokens=14, most_prompt_tokens=16, num_prefixes=2, many_choices=0.2, resumed=0.0, deadlines=0.0, stops=0.5
    )
    for index in range(num_requests):
        world.now += 0.5
        world.submit(load.request(choose, index + 1, world.now, world.settings))
        if world.schedule():
            world.now += 0.25
            world.deliver()
    world.drain()
    writer.close()
    return world
