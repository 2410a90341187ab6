"""CURVE keys for ZeroMQ over tcp: the scheduler proves its identity, and admits only workers on its allow-list.

A key directory holds scheduler.key(_secret), worker.key(_secret) and allowed_workers/, the public keys of workers that
may connect. A worker needs worker.key_secret and scheduler.key; a scheduler needs scheduler.key_secret and
allowed_workers/.
"""

import shutil
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

_ALLOWED = "allowed_workers"
_DOMAIN = "octavo"


class CurveError(ValueError):
    """Keys are missing or can't be read; the message says which, and how to make them."""


def make_keys(directory: Path) -> None:
    """Writes a scheduler's and a worker's key pair, secrets with mode 0600.

    Raises CurveError if there are keys already.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    present = sorted(path.name for path in directory.glob("*.key*"))
    if present:
        raise CurveError(
            f"{directory} holds keys already ({', '.join(present)}): give another directory or remove them"
        )
    for name in ("scheduler", "worker"):
        _, secret = zmq.auth.create_certificates(directory, name)
        Path(secret).chmod(0o600)
    allowed = directory / _ALLOWED
    allowed.mkdir()
    shutil.copy(directory / "worker.key", allowed)


def server_curve(socket: zmq.Socket, curve_dir: Path) -> None:
    """Makes a socket a CURVE server. Call it before bind; its context needs start_authenticator. Raises CurveError."""
    socket.curve_publickey, socket.curve_secretkey = _load_secret(curve_dir / "scheduler.key_secret")
    socket.curve_server = True
    socket.zap_domain = _DOMAIN.encode()


def client_curve(socket: zmq.Socket, curve_dir: Path) -> None:
    """Makes a socket a CURVE client that trusts only the scheduler's key. Call it before connect. Raises CurveError."""
    socket.curve_publickey, socket.curve_secretkey = _load_secret(curve_dir / "worker.key_secret")
    socket.curve_serverkey = _load(curve_dir / "scheduler.key")[0]


def start_authenticator(context: zmq.Context, curve_dir: Path) -> ThreadAuthenticator:
    """Starts the thread that admits only the workers in allowed_workers/; stop() ends it.

    Raises CurveError.
    """
    allowed = curve_dir / _ALLOWED
    if not any(allowed.glob("*.key")):
        raise CurveError(f"curve_dir: {allowed} holds no worker's public key; make keys with `octavo keys {curve_dir}`")
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain=_DOMAIN, location=str(allowed))
    return authenticator


def _load_secret(path: Path) -> tuple[bytes, bytes]:
    public, secret = _load(path)
    if secret is None:
        raise CurveError(f"curve_dir: {path} holds no secret key")
    return public, secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise CurveError(
            f"curve_dir: cannot read {path} ({error}); make keys with `octavo keys {path.parent}`"
        ) from None
