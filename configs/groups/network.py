"""How the processes reach each other, who may connect, and how connections are protected."""

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
    """Validated with the others, in configs.options."""

    runtime_dir: Path = option(
        NETWORK,
        _default_runtime_dir,
        "Directory, of mode 0700, for the sockets between processes. Two clusters need two.",
    )
    scheduler_addresses: Addresses = option(
        NETWORK,
        (),
        "gRPC address of each replica's scheduler, HOST:PORT or unix:PATH, comma-separated; for routers also file:PATH "
        "of a file that holds the address and may change. Empty: unix sockets in runtime_dir.",
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
        "Address of a worker's machine that the other workers of its replica reach it by; a setting of that machine, "
        "for tcp step_addresses. Empty: the one from which it reaches its scheduler.",
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
        """gRPC target of a replica's scheduler."""
        if self.scheduler_addresses:
            return self.scheduler_addresses[replica]
        return f"unix:{self.runtime_dir}/scheduler-{replica}.sock"

    def step_address(self, replica: int) -> str:
        """ZeroMQ endpoint between a replica's scheduler and its workers."""
        if self.step_addresses:
            return self.step_addresses[replica]
        return f"ipc://{self.runtime_dir}/step-{replica}.sock"

    def meets_over_tcp(self, replica: int) -> bool:
        """True if the workers of a replica may be on several machines, where they can't find each other by a file."""
        return self.step_address(replica).startswith("tcp://")


class SecurityOptions(BaseModel):
    """Validated with the others, in configs.options."""

    api_keys_file: str = option(
        NETWORK,
        "",
        "File of mode 0600, YAML or JSON, with the API keys that may call the router, their limits and their tenants. "
        "Read again on SIGHUP. Empty: anyone may.",
    )
    tls_cert_file: str = option(
        NETWORK,
        "",
        "PEM file with the certificate (and those between it and its CA) by which the router's gRPC and HTTP servers "
        "speak TLS; needs tls_key_file. Empty: no TLS.",
    )
    tls_key_file: str = option(NETWORK, "", "PEM file with the key of tls_cert_file, without a password.")
    tls_client_ca_file: str = option(
        NETWORK,
        "",
        "PEM file with the CAs of clients: who has no certificate of theirs gets no connection (mTLS). Empty: anyone.",
    )
    scheduler_tls_dir: str = option(
        NETWORK,
        "",
        "Directory with tls.crt, tls.key and ca.crt, by which router and schedulers prove to each other who they are, "
        "where scheduler_addresses are no unix sockets. Empty: no TLS between them.",
    )

    def _check_tls(self) -> None:
        """Raises ValueError."""
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            given, missing = "tls_cert_file", "tls_key_file"
            if self.tls_key_file:
                given, missing = missing, given
            raise ValueError(f"{given}={getattr(self, given)!r} needs {missing}, too")
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise ValueError(
                f"tls_client_ca_file={self.tls_client_ca_file!r} needs tls_cert_file and tls_key_file: without TLS no "
                "client shows a certificate"
            )
