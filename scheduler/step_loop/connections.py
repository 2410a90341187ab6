"""Opens what a step loop needs: its sockets, and the recording if one is wanted."""

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import zmq

from configs.options import Options
from runtime.awake_time import AwakeTime
from runtime.security.curve import start_authenticator
from runtime.wire import heartbeat_endpoint
from scheduler.lockstep.lockstep import Lockstep
from scheduler.ranks.epochs import rendezvous_of
from scheduler.ranks.heartbeats import Heartbeats
from scheduler.ranks.membership import Terms
from scheduler.ranks.workers import Workers
from scheduler.recording.file import RecordingWriter, recording_path
from scheduler.sockets import InvalidMessages

# The step loop wakes at least this often.
LONGEST_WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """The connections of a step loop, for the thread that opened them. lockstep: None unless replicas compute their
    steps together. recording: None if none is wanted. awake: knows when the step loop stood still."""

    workers: Workers
    heartbeats: Heartbeats
    awake: AwakeTime
    lockstep: Lockstep | None
    recording: RecordingWriter | None


def open_connections(
    stack: ExitStack,
    options: Options,
    replica: int,
    invalid: InvalidMessages,
    failure: Callable[[], str],
) -> Connections:
    """Binds the sockets of a replica; `stack` closes them.

    failure: called when the stack unwinds; returns the reason for the workers to fail as well, or an empty string for
    an orderly end. Raises AddressError, CurveError or RecordingError.
    """
    endpoint = options.step_address(replica)
    curve_dir = Path(options.curve_dir) if options.curve_dir and endpoint.startswith("tcp://") else None
    recording = None
    if options.trace:
        path = recording_path(options.trace, replica)
        recording = RecordingWriter(path, options.trace_max_mib << 20, replica)
        stack.callback(recording.close)
    context = stack.enter_context(zmq.Context())
    if curve_dir is not None:
        stack.callback(start_authenticator(context, curve_dir).stop)
    heartbeats = Heartbeats(
        context,
        heartbeat_endpoint(endpoint),
        curve_dir,
        instance=secrets.randbits(63),
        invalid=invalid,
        timeout=options.heartbeat_timeout,
    )
    heartbeats.start_bound()
    stack.callback(heartbeats.stop)
    awake = AwakeTime(LONGEST_WAIT_S)
    workers = Workers(
        context,
        endpoint,
        curve_dir,
        Terms.of(options),
        heartbeats,
        invalid,
        awake,
        rendezvous=rendezvous_of(options, replica),
        in_lockstep=options.in_lockstep,
        heartbeat_timeout=options.heartbeat_timeout,
        step_timeout=options.step_timeout,
    )
    stack.callback(lambda: workers.close(failure()))
    lockstep = None
    if options.in_lockstep:
        lockstep = Lockstep(stack, context, options, replica, curve_dir, workers, invalid, awake)
    return Connections(workers=workers, heartbeats=heartbeats, awake=awake, lockstep=lockstep, recording=recording)
