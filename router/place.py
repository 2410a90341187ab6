"""Which router of a cluster a process is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPlace:
    """Which one of num_routers it is, and which one of its api_server_count processes. shares_ports: with the others of
    these; else its ports are its own."""

    router: int = 0
    process: int = 0
    shares_ports: bool = False

    def __str__(self) -> str:
        return f"{self.router}.{self.process}" if self.shares_ports else str(self.router)


ALONE = RouterPlace()
