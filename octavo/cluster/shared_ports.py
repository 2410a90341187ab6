"""Keeps apart clusters whose routers have several processes each, which share a port by SO_REUSEPORT.

Any process of one user that sets SO_REUSEPORT may join those that listen on a port and set it, too, and then silently
gets a part of their connections. `octavo.cluster.ports` finds what listens already; here is what keeps out a second
cluster that starts at the same time, before anybody listens.
"""

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from configs.options import Options
from octavo.cluster.errors import ClusterError


@contextmanager
def claimed_ports(options: Options) -> Iterator[None]:
    """Lets no other `octavo up` share the ports that this one's routers share among their processes, until the block
    ends, or the process does. Raises ClusterError.

    A claim is a socket with an abstract name. Such names belong to the same network namespace as ports do, and leave
    nothing behind. A socket that is bound to the port itself would not do: with SO_REUSEADDR, which a port needs that
    was in use a minute ago, two can be bound to it as long as neither listens.
    """
    with ExitStack() as claims:
        if options.api_server_count > 1:
            if sys.platform != "linux":
                raise ClusterError(
                    f"api_server_count={options.api_server_count} needs Linux, which deals connections out to the "
                    "processes that share a port; use num_routers instead"
                )
            for router in range(options.num_routers):
                _claim(claims, "port", options.router_port(router))
                if options.http_port:
                    _claim(claims, "http_port", options.router_http_port(router))
        yield


def _claim(claims: ExitStack, option: str, port: int) -> None:
    claim = claims.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    try:
        claim.bind(f"\0octavo/port/{port}")
    except OSError as error:
        raise ClusterError(
            f"{option}: port {port} is shared by the routers of another `octavo up` with api_server_count "
            f"({error.strerror}); stop that one, or choose another port"
        ) from None
