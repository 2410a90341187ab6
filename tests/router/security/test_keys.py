"""API keys: what a key file may contain, which key a call brings, and how much of the key's limits is left."""

import hashlib
from pathlib import Path

import pytest

from router.errors import RateLimited, Unauthenticated
from router.security.identity import ANYONE, Identity, RateLimits
from router.security.keys import Keys, KeysError

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
DIGEST = hashlib.sha256(BOB.encode()).hexdigest()


def _file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_call_is_whose_key_it_brings(tmp_path: Path) -> None:
    text = f"keys:\n- {{name: alice, key: {ALICE}, priority: 5}}\n- {{name: bob, sha256: {DIGEST}, admin: true}}\n"
    keys = Keys(_file(tmp_path / "keys", text))
    alice = keys.identify(f"Bearer {ALICE}")
    assert (alice.tenant, alice.is_admin, alice.priority(0), alice.priority(9)) == ("alice", False, 5, 9)
    assert keys.identify("", BOB).tenant == keys.identify(f"bearer  {BOB}").tenant == "bob"
    for authorization in (
        "",
        f"Bearer {ALICE[:-1]}",
        f"Bearer {ALICE}x",
        f"Basic {ALICE}",
        f"Bearer {DIGEST}",
        "Bearer ",
    ):
        with pytest.raises(Unauthenticated) as caught:
            keys.identify(authorization)
        assert ALICE[:-1] not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keys: []", "at least 1"),
        (f"keys: [{{name: a/b, key: {ALICE}}}]", "keys.0.name"),
        ("keys: [{name: a, key: short-secret}]", "too short"),
        ("keys: [{name: a, sha256: abcdef-secret}]", "64 hexadecimal"),
        (f"keys: [{{name: a, key: {ALICE}, sha256: {DIGEST}}}]", "either"),
        (f"keys: [{{name: a, key: {ALICE}, limit: 1}}]", "limit"),
        (f"keys: [{{name: a, key: {ALICE}, requests_per_minute: 0}}]", "requests_per_minute"),
        (f"keys: [{{name: a, key: {BOB}}}, {{name: b, sha256: {DIGEST}}}]", "twice"),
        (f"keys: [{{name: a, key: {ALICE}", "line"),
        (f"{ALICE}", "keys"),
    ],
)
def test_a_bad_file_is_refused_without_telling_what_it_holds(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(KeysError, match=says) as caught:
        Keys(_file(tmp_path / "keys", text))
    assert not any(secret in str(caught.value) for secret in (ALICE, BOB, DIGEST, "-secret"))


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="0640"):
        Keys(_file(tmp_path / "keys", f"keys: [{{name: a, key: {ALICE}}}]", 0o640))


def test_reading_again_keeps_what_is_used_up_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    path = _file(tmp_path / "keys", f"keys: [{{name: a, key: {ALICE}}}]")
    keys = Keys(path)
    before = keys.identify("", ALICE)
    _file(path, f'{{"keys": [{{"name": "a", "key": "{ALICE}"}}, {{"name": "b", "key": "{BOB}"}}]}}')
    keys.reread()
    assert keys.identify("", ALICE) is before
    assert keys.identify("", BOB).tenant == "b"
    _file(path, "keys: 5")
    with pytest.raises(KeysError):
        keys.reread()
    assert keys.identify("", BOB).tenant == "b"
    _file(path, f"keys: [{{name: b, key: {BOB}}}]")
    keys.reread()
    with pytest.raises(Unauthenticated):
        keys.identify("", ALICE)


def test_tenants_share_neither_ids_nor_salts() -> None:
    alice, bob = Identity(tenant="alice"), Identity(tenant="bob")
    assert len({each.scoped_id("x") for each in (alice, bob, ANYONE)}) == 3
    assert len({each.scoped_salt(salt) for each in (alice, bob, ANYONE) for salt in ("", "s")}) == 6
    assert ANYONE.scoped_salt("s") == "s"


def test_requests_refill_evenly_and_a_refused_one_does_not_count() -> None:
    now = 0.0
    limits = RateLimits(requests_per_minute=2, clock=lambda: now)
    limits.begin_request()
    limits.begin_request()
    for _ in range(3):
        with pytest.raises(RateLimited) as caught:
            limits.begin_request()
        assert caught.value.retry_after_s == 30
    now = 30.0
    limits.begin_request()
    now = 1000.0
    limits.begin_request()
    limits.begin_request()
    with pytest.raises(RateLimited):
        limits.begin_request()


def test_overdrawn_tokens_are_paid_back_first() -> None:
    now = 0.0
    limits = RateLimits(tokens_per_minute=60, clock=lambda: now)
    limits.begin_request()
    limits.spend_tokens(89)
    with pytest.raises(RateLimited, match="tokens_per_minute=60") as caught:
        limits.begin_request()
    assert caught.value.retry_after_s == 30
    now = 30.0
    limits.begin_request()
