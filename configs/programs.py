"""Names the modules that a cluster's processes run as."""


def module_of(kind: str) -> str:
    """Returns what `python -m` runs: "router" in a checkout, "octavo.router" where the wheel is installed.

    kind: "router", "scheduler" or "worker".
    """
    return __name__.rpartition("configs.")[0] + kind
