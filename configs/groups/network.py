"""The options of who may connect, and how connections are protected."""

from pydantic import BaseModel

from configs.groups.field import NETWORK, option


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
