"""Pauses a replica for all its routers, as vLLM's pause_generation does, and says when it is paused."""

from protos import scheduler_pb2
from scheduler.core.core import Core
from scheduler.sessions import commands
from scheduler.sessions.requests import Requests


class Pauses:
    """The pause of one replica; the latest command counts."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._mode = scheduler_pb2.PAUSE_MODE_NONE
        # Commands that are not answered yet: it is not paused before all that was begun has ended.
        self._waiting: list[commands.Pause] = []

    @property
    def is_frozen(self) -> bool:
        """True if no step may be planned."""
        return self._mode == scheduler_pb2.PAUSE_MODE_KEEP

    def take(self, command: commands.Pause, now: float) -> None:
        if command.mode == scheduler_pb2.PAUSE_MODE_UNSPECIFIED:
            self._answer(command)
            return
        self._mode = command.mode
        self._requests.pause(command.mode, now)
        self._waiting.append(command)

    def settle(self, core: Core | None) -> None:
        """Answers the commands whose pause is complete, or has been ended by a later one."""
        if not self._waiting:
            return
        resumed = self._mode == scheduler_pb2.PAUSE_MODE_NONE
        is_busy = core is not None and (core.num_steps_in_flight > 0 or (core.has_work and not self.is_frozen))
        if is_busy and not resumed:
            return
        if core is not None and not resumed and any(command.clear_cache for command in self._waiting):
            core.reset_prefix_cache()
        for command in self._waiting:
            self._answer(command)
        self._waiting.clear()

    def _answer(self, command: commands.Pause) -> None:
        """Does nothing if the caller no longer waits."""
        if command.answer.set_running_or_notify_cancel():
            command.answer.set_result(self._mode)
