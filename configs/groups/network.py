"""Options of addresses between processes, of access, and of the protection of connections."""

import os
import tempfile
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from configs.groups.field import NETWORK, option, split_commas


def _default_runtime_dir() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"octavo-{os.getuid()}"


Addresses = Annotated[tuple[str, ...], BeforeValidator(split_commas)]


class NetworkOptions(BaseModel):
    """Part of configs.options.Options, which validates all groups."""

    runtime_dir: Path = option(
        NETWORK,
        _default_runtime_dir,
        "Directory, of mode 0700, for the sockets between processes. Each cluster needs its own.",
    )
    scheduler_addresses: Addresses = option(
        NETWORK,
        (),
        "gRPC address of each replica's scheduler, HOST:PORT or unix:PATH, comma-separated; for routers also "
        "file:PATH, a file with the address, which may change. Empty: unix sockets in runtime_dir.",
    )
    step_addresses: Addresses = option(
        NETWORK,
        (),
        "ZeroMQ endpoint between each replica's scheduler and its workers, "
        "ipc://PATH or tcp://HOST:PORT (heartbeats: the next port). Empty: ipc sockets in runtime_dir. "
        "tcp needs curve_dir.",
    )
    curve_dir: str = option(
        NETWORK, "", "Directory with the CURVE keys of tcp step_addresses, as `octavo keys DIR` makes it."
    )
    worker_host: str = option(
        NETWORK,
        "",
        "Address by which the other workers of a replica reach the workers of this machine, for tcp step_addresses; "
        "each machine has its own. Empty: the one from which a worker reaches its scheduler.",
    )

    peer_host: str = option(
        NETWORK,
        "",
        "Address of this machine at which a router process answers routers on other machines, at any free port: each "
        "finds the streams of the others. With scheduler_tls_dir both show its certificate. Empty: a unix socket in "
        "runtime_dir, for the routers of this machine.",
    )

    def _check_addresses(self) -> None:
        """Raises ValueError."""
        for address in self.step_addresses:
            if not address.startswith(("ipc://", "tcp://")):
                raise ValueError(f"step_addresses: {address!r} must begin with ipc:// or tcp://")
            if address.startswith("tcp://") and not self.curve_dir:
                raise ValueError(f"step_addresses: {address!r} needs curve_dir; make keys with `octavo keys DIR`")
        if self.worker_host and not any(address.startswith("tcp://") for address in self.step_addresses):
            raise ValueError(
                f"worker_host={self.worker_host!r} is for workers on several machines, which need tcp:// "
                f"step_addresses; on one machine they talk over its loopback address"
            )

    def scheduler_address(self, replica: int) -> str:
        """The gRPC target of a replica's scheduler."""
        if self.scheduler_addresses:
            return self.scheduler_addresses[replica]
        return f"unix:{self.runtime_dir}/scheduler-{replica}.sock"

    def step_address(self, replica: int) -> str:
        """The ZeroMQ endpoint between a replica's scheduler and its workers."""
        if self.step_addresses:
            return self.step_addresses[replica]
        return f"ipc://{self.runtime_dir}/step-{replica}.sock"

    def meets_over_tcp(self, replica: int) -> bool:
        """True if a replica's workers may be on several machines, and so can't find each other by a file."""
        return self.step_address(replica).startswith("tcp://")


class SecurityOptions(BaseModel):
    """Part of configs.options.Options, which validates all groups."""

    api_keys_file: str = option(
        NETWORK,
        "",
        "File of mode 0600, YAML or JSON, with the API keys that may call the router, their limits and their tenants. "
        "Read again on SIGHUP. Empty: anyone may call it.",
    )
    tls_cert_file: str = option(
        NETWORK,
        "",
        "PEM file with the TLS certificate (and those between it and its CA) of the router's gRPC and HTTP servers; "
        "needs tls_key_file. Empty: no TLS.",
    )
    tls_key_file: str = option(NETWORK, "", "PEM file with the key of tls_cert_file, without a password.")
    tls_client_ca_file: str = option(
        NETWORK,
        "",
        "PEM file with the CAs of clients: only clients with a certificate of these CAs may connect (mTLS). Empty: all "
        "may.",
    )
    scheduler_tls_dir: str = option(
        NETWORK,
        "",
        "Directory with tls.crt, tls.key and ca.crt, by which routers and schedulers prove their identity to each "
        "other if scheduler_addresses are not unix sockets. Empty: no TLS between them.",
    )

    def _check_tls(self) -> None:
        """Raises ValueError."""
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            given, missing = "tls_cert_file", "tls_key_file"
            if self.tls_key_file:
                given, missing = missing, given
            raise ValueError(f"{given}={getattr(self, given)!r} also needs {missing}")
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise ValueError(
                f"tls_client_ca_file={self.tls_client_ca_file!r} needs tls_cert_file and tls_key_file: without TLS no "
                "client shows a certificate"
            )
