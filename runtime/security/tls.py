"""TLS of the servers and channels of routers and schedulers, from PEM files.

Servers check their files at every new connection: the next client sees a renewed certificate, and open connections go
on.
"""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from runtime.security.renewal import Renewed

# The file names of Kubernetes' TLS secrets.
_CERT, _KEY, _CA = "tls.crt", "tls.key", "ca.crt"


class TlsError(ValueError):
    """TLS files can't be used; the message names them and the option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The PEM files of one side. option: the option that names them, for errors. ca: the CA of the other side; None: a
    server asks for no certificate."""

    option: str
    cert: Path
    key: Path
    ca: Path | None

    @staticmethod
    def of_directory(option: str, directory: str) -> "TlsFiles":
        path = Path(directory).expanduser()
        return TlsFiles(option=option, cert=path / _CERT, key=path / _KEY, ca=path / _CA)

    def check(self) -> None:
        """Checks the files now; gRPC would fail only at the first connection, with a less plain message.

        Raises TlsError.
        """
        self._load()

    def _load(self) -> ssl.SSLContext:
        """Raises TlsError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for what, load in (
            (f"{self.cert} and {self.key}", lambda: context.load_cert_chain(self.cert, self.key, _no_password)),
            (f"{self.ca}", lambda: self.ca is None or context.load_verify_locations(self.ca)),
        ):
            try:
                load()
            except (OSError, ValueError) as error:
                cause = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
                raise TlsError(
                    f"{self.option}: {what} can't be used ({cause}): give PEM files, and a certificate with its own key"
                ) from None
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    @property
    def paths(self) -> list[Path]:
        return [self.cert, self.key] + ([] if self.ca is None else [self.ca])

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials that are read again when the files change, at the next connection. Raises TlsError."""
        shown = Renewed(self.paths, self._certificates)
        return grpc.dynamic_ssl_server_credentials(
            shown.current(), shown.current, require_client_authentication=self.ca is not None
        )

    def server_context(self) -> ssl.SSLContext:
        """A context that is read again when the files change, for servers on asyncio. Raises TlsError."""
        shown = Renewed(self.paths, self._load)
        context = self._load()

        def show_current(connection: ssl.SSLObject, name: str | None, original: ssl.SSLContext) -> None:
            connection.context = shown.current()

        context.sni_callback = show_current
        return context

    def _certificates(self) -> grpc.ServerCertificateConfiguration:
        """Raises TlsError."""
        self.check()
        return grpc.ssl_server_certificate_configuration(
            [(self.key.read_bytes(), self.cert.read_bytes())],
            root_certificates=None if self.ca is None else self.ca.read_bytes(),
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a client that shows its own certificate. Raises TlsError."""
        self.check()
        return grpc.ssl_channel_credentials(
            None if self.ca is None else self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes()
        )


def is_unix(address: str) -> bool:
    """True if a gRPC address is a socket file, which needs no TLS."""
    return address.startswith(("unix:", "unix-abstract:"))


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, object]]
) -> grpc.aio.Channel:
    """Opens a channel, without TLS if credentials is None or the address is a socket file."""
    if credentials is None or is_unix(address):
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def add_port(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Adds a port, without TLS if credentials is None or the address is a socket file. Returns its number.

    Raises RuntimeError if the server can't listen on it.
    """
    if credentials is None or is_unix(address):
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


def _no_password() -> str:
    """Fails where OpenSSL would ask for a password at the terminal."""
    raise ValueError("the key is encrypted: give one without a password")
