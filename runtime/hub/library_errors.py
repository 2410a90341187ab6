"""Translates errors of huggingface_hub, the network and the disk into HubError."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from runtime.hub.errors import HubError, UnreachableError

_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turns errors of huggingface_hub, the network and the disk into HubError."""
    try:
        yield
    except HFValidationError:
        raise HubError(f"{repo!r} is not the name of a model on the hub: names look like ORG/NAME") from None
    except OfflineModeIsEnabled:
        raise UnreachableError("HF_HUB_OFFLINE is set, so nothing can be downloaded") from None
    except GatedRepoError:
        raise HubError(_gated(repo)) from None
    except RepositoryNotFoundError:
        private = "your token may lack access" if get_token() else "if it is private, set HF_TOKEN"
        raise HubError(f"the hub at {constants.ENDPOINT} has no model {repo}: check the name; {private}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        text = f"the hub at {constants.ENDPOINT} answered {status} for {repo}: {error.server_message or _line(error)}"
        raise (UnreachableError if status >= 500 else HubError)(text) from None
    except httpx2.HTTPError as error:
        raise UnreachableError(
            f"the hub at {constants.ENDPOINT} cannot be reached ({_line(error)}): check the network, the proxy "
            f"(HTTPS_PROXY) and HF_ENDPOINT"
        ) from None
    except LocalEntryNotFoundError as error:
        raise UnreachableError(f"the hub at {constants.ENDPOINT} did not provide {repo}: {_line(error)}") from None
    except OSError as error:
        if error.errno in _FULL:
            raise HubError(
                f"the disk of {constants.HF_HUB_CACHE} is full: free some space, or set HF_HOME to a directory on "
                f"another disk; the downloaded part is kept"
            ) from None
        raise HubError(
            f"cannot write {repo} to {constants.HF_HUB_CACHE}: {error}; HF_HOME sets another directory"
        ) from None


def _gated(repo: str) -> str:
    page = f"{constants.ENDPOINT}/{repo}"
    if get_token():
        return f"{repo} is gated, and your token has no access: request it at {page}"
    return f"{repo} is gated: accept its terms at {page}, then set HF_TOKEN"


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
