"""The options of who may connect, and how connections are protected."""

from pydantic import BaseModel

from configs.option_field import NETWORK, option


class SecurityOptions(BaseModel):
    """Validated with the others, in configs.options."""

    api_keys_file: str = option(
        NETWORK,
        "",
        "File of mode 0600, YAML or JSON, with the API keys that may call the router, their limits and their tenants. "
        "Read again on SIGHUP. Empty: anyone may.",
    )
