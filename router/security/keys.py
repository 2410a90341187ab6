"""Reads the file of API keys, and finds the one that a call brings."""

import hashlib
import hmac
import logging
import os
import stat
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from router.errors import Unauthenticated
from router.security.identity import Identity, RateLimits

log = logging.getLogger("octavo.router.security")

_LEAST_KEY_CHARS = 16
_HOW_TO_SEND = "send `authorization: Bearer KEY`, or `x-api-key: KEY`"
_PerMinute = Annotated[int, Field(ge=1, le=10**12)]


class KeysError(ValueError):
    """The file can't be used; the message says why and what would work, without its secrets."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, allow_inf_nan=False)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    key: SecretStr | None = None
    sha256: SecretStr | None = None
    requests_per_minute: _PerMinute | None = None
    tokens_per_minute: _PerMinute | None = None
    # Requests that ask for a lower number, to run earlier, get this one.
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    max_streams: int | None = Field(None, ge=1, le=2**20)
    weight: float = Field(1.0, ge=0.01, le=100)
    admin: bool = False

    @model_validator(mode="after")
    def _check_secret(self) -> "_Entry":
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either `key` or `sha256`")
        key = None if self.key is None else self.key.get_secret_value()
        if key is not None and len(key) < _LEAST_KEY_CHARS:
            raise ValueError(f"`key` is too short to be secret: use {_LEAST_KEY_CHARS} characters or more")
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise ValueError("`key` does not fit into a header: use ASCII without spaces")
        if self.sha256 is not None and len(_from_hex(self.sha256.get_secret_value())) != 32:
            raise ValueError("`sha256` is not 64 hexadecimal digits")
        return self

    @property
    def digest(self) -> bytes:
        if self.sha256 is not None:
            return _from_hex(self.sha256.get_secret_value())
        assert self.key is not None
        return _digest(self.key.get_secret_value())


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    keys: list[_Entry] = Field(min_length=1, max_length=10_000)


class Keys:
    """The keys of a file. Keys with the same name are one tenant, each with limits of its own."""

    def __init__(self, path: Path) -> None:
        """Raises KeysError."""
        self._path = path
        self._entries = _read(path)
        self._identities = {entry.digest: _identity(entry) for entry in self._entries}

    def __len__(self) -> int:
        return len(self._entries)

    def reread(self) -> None:
        """Reads the file again. An entry that has not changed keeps its use of its limits so far.

        Raises KeysError, and keeps the old keys then.
        """
        entries = _read(self._path)
        was = {entry.digest: entry for entry in self._entries}
        self._identities = {
            entry.digest: self._identities[entry.digest] if was.get(entry.digest) == entry else _identity(entry)
            for entry in entries
        }
        self._entries = entries

    def identify(self, authorization: str, api_key: str = "") -> Identity:
        """Finds the owner of a call's key. authorization, api_key: its headers of these names; empty: it has none.

        Raises Unauthenticated.
        """
        scheme, _, bearer = authorization.partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else api_key
        if not key:
            raise Unauthenticated(f"this server needs an API key: {_HOW_TO_SEND}")
        presented, found = _digest(key), None
        # Compares with all of them, in a time that does not tell which one matched, or how far.
        for digest, identity in self._identities.items():
            if hmac.compare_digest(digest, presented):
                found = identity
        if found is None:
            raise Unauthenticated(f"this API key is not known here: {_HOW_TO_SEND} with a valid one")
        return found

    def limited(self) -> list[Identity]:
        """The keys that have rate limits."""
        return [identity for identity in self._identities.values() if identity.limits.are_any]

    def of_tenant(self, tenant: str, key_digest: str) -> Identity | None:
        """Finds who made a call earlier: by the key, or another key of the tenant if that one is gone; None: none."""
        found = [each for each in self._identities.values() if each.tenant == tenant]
        return next((each for each in found if each.key_digest == key_digest), found[0] if found else None)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _from_hex(text: str) -> bytes:
    """Returns no bytes if the text is not hexadecimal."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _identity(entry: _Entry) -> Identity:
    return Identity(
        tenant=entry.name,
        key_digest=entry.digest.hex(),
        limits=RateLimits(entry.requests_per_minute, entry.tokens_per_minute),
        least_priority=entry.priority,
        max_streams=entry.max_streams,
        weight=entry.weight,
        is_admin=entry.admin,
    )


def _read(path: Path) -> list[_Entry]:
    try:
        with path.open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise KeysError(f"api_keys_file={str(path)!r} has mode {mode:04o}: others may read it; chmod 600 it")
            content = yaml.safe_load(file)
    except OSError as error:
        raise KeysError(f"api_keys_file={str(path)!r} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeysError(f"api_keys_file={str(path)!r} is not UTF-8") from None
    except yaml.YAMLError as error:
        # The error's own message quotes the file.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise KeysError(f"api_keys_file={str(path)!r} is neither YAML nor JSON{where}") from None
    try:
        entries = _Content.model_validate(content).keys
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        message = first["msg"].removeprefix("Value error, ")
        raise KeysError(
            f"api_keys_file={str(path)!r}: {place}: {message}; give `keys`, a list of {{name, key or sha256}}"
        ) from None
    if len({entry.digest for entry in entries}) < len(entries):
        raise KeysError(f"api_keys_file={str(path)!r} has the same key twice: give each entry a key of its own")
    return entries
