"""Names to which an HTTP server answers.

A page of any site can have its name lead to this machine after it was loaded (DNS rebinding): its requests then count
as those of the server's own origin, and it may read the answers. They still carry the page's name in the header Host.
"""

import functools
import ipaddress
import socket
import threading
from collections.abc import Sequence

# A name in DNS has at most 253 characters; the port comes on top.
_MOST_CHARS = 262
# Top-level domains that are reserved for use in a local network, so that no site can have a name in them: RFC 6762
# (mDNS; Kubernetes' `cluster.local`), ICANN's `internal`, RFC 8375, RFC 6761.
_LOCAL_DOMAINS = (".local", ".internal", ".home.arpa", ".localhost")
ANY_HOST = "*"


class Hosts:
    """bound: the address that the server listens at. allowed: names besides its own: `*` is any, `.example.com` is that
    name and all below it."""

    def __init__(self, bound: str, allowed: Sequence[str] = ()) -> None:
        self.is_loopback = is_loopback(bound)
        self._allowed = tuple(name.lower().rstrip(".") for name in allowed)
        self._own = {bound.lower()}
        self._allows = functools.lru_cache(maxsize=256)(self._is_ours)
        if not self.is_loopback:
            self._own.add(socket.gethostname().lower())
            # May wait for a name server.
            threading.Thread(target=self._find_own_name, name="own-name", daemon=True).start()

    def __str__(self) -> str:
        """Tells what is allowed, for errors."""
        names = (
            "localhost and loopback addresses"
            if self.is_loopback
            else ("IP addresses, names without a dot, this machine's own and those under .local and .internal")
        )
        return ", ".join((names, *self._allowed))

    def _find_own_name(self) -> None:
        self._own.add(socket.getfqdn().lower())
        self._allows.cache_clear()

    def allows(self, header: str) -> bool:
        """Tells whether a value of the header Host names this server."""
        return ANY_HOST in self._allowed or (len(header) <= _MOST_CHARS and self._allows(header))

    def _is_ours(self, header: str) -> bool:
        host = host_of(header)
        if is_loopback(host) or any(_matches(host, name) for name in self._allowed):
            return True
        if self.is_loopback or not host:
            return False
        return host in self._own or "." not in host or host.endswith(_LOCAL_DOMAINS) or _address(host) is not None


def host_of(header: str) -> str:
    """Returns the name or address in a value of the header Host; empty if it is neither."""
    if header.startswith("["):
        host, bracket, port = header[1:].partition("]")
        host = host if bracket and isinstance(_address(host), ipaddress.IPv6Address) else ""
        port = port.removeprefix(":") if port.startswith(":") or not port else "?"
    else:
        host, _, port = header.partition(":")
    host = host.lower().removesuffix(".")
    is_name = bool(host) and all(part and part.replace("-", "").replace("_", "").isalnum() for part in host.split("."))
    is_good = host.isascii() and (is_name or _address(host) is not None)
    return host if is_good and (not port or port.isdecimal()) else ""


def is_loopback(host: str) -> bool:
    """Tells whether a name or an address leads to this machine only, at any resolver that follows RFC 6761."""
    address = _address(host)
    if address is None:
        return host == "localhost" or host.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _matches(host: str, allowed: str) -> bool:
    if allowed.startswith("."):
        return host == allowed[1:] or host.endswith(allowed)
    return host == allowed
