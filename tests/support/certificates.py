"""Certificates made by the openssl command line, which must be installed."""

import subprocess
from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


class Authority:
    """A CA in its own directory: ca.crt, and NAME.crt with NAME.key for each certificate that it signs."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory, self.ca = directory, directory / "ca.crt"
        self._openssl("req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=tests")

    def sign(self, name: str, ip: str = "127.0.0.1") -> tuple[Path, Path]:
        """Certificate and key of a server or client at this IP address."""
        certificate, key = self.directory / f"{name}.crt", self.directory / f"{name}.key"
        self._openssl(
            "req",
            "-x509",
            *_NEW_KEY,
            "-CA",
            "ca.crt",
            "-CAkey",
            "ca.key",
            "-subj",
            f"/CN={name}",
            "-addext",
            f"subjectAltName=IP:{ip}",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-keyout",
            str(key),
            "-out",
            str(certificate),
        )
        return certificate, key

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(("openssl", *arguments), cwd=self.directory, check=True, capture_output=True, timeout=30)
