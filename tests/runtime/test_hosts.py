"""A server's names: those that a web page may have are not among them."""

import socket

import pytest

from runtime.security.hosts import Hosts, host_of, is_loopback


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8000", "localhost"),
        ("localhost.:80", "localhost"),
        ("127.0.0.1:8000", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[::1]", "::1"),
        ("a-b_c.example", "a-b_c.example"),
        ("", ""),
        (":80", ""),
        ("[::1", ""),
        ("[evil]", ""),
        ("[::1]evil", ""),
        ("::1", ""),
        ("a:b", ""),
        ("a/b", ""),
        ("a b", ""),
        ("user@localhost", ""),
        ("a..b", ""),
        ("localhost\0", ""),
        ("localhost:", "localhost"),
        ("lock\u00e0l", ""),
        ("localhost:8000:1", ""),
        ("[127.0.0.1]", ""),
    ],
)
def test_the_name_in_a_header(header: str, host: str) -> None:
    assert host_of(header) == host


LOOPBACK = ("localhost", "localhost:1", "a.localhost", "127.0.0.1", "127.9.9.9:80", "[::1]:80", "[::ffff:127.0.0.1]")
OF_NETWORKS = (
    "192.168.0.7:8000",
    "8.8.8.8",
    "[fd00::7]:8000",
    "router",
    "router:8000",
    "octavo-router",
    "printer.local",
    "octavo-router.octavo.svc.cluster.local",
    "vm.zone.internal",
)
FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evillocalhost.com",
    "a.svc",
    "evil.local.example",
    "x" * 300,
    "evil.example.",
    "[evil.example]",
    "evil example",
    "local.",
    "127.0.0.1@evil.example",
)


@pytest.mark.parametrize("bound", ["127.0.0.1", "::1", "localhost", "127.0.0.2"])
def test_a_server_of_one_machine_has_its_names_alone(bound: str) -> None:
    hosts = Hosts(bound)
    assert hosts.is_loopback
    assert [each for each in LOOPBACK if not hosts.allows(each)] == []
    assert [each for each in OF_NETWORKS + FOREIGN + ("",) if hosts.allows(each)] == []


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "192.168.0.7", "my.name.example"])
def test_a_server_of_a_network_has_no_name_that_a_site_can_have(bound: str) -> None:
    hosts = Hosts(bound)
    assert not hosts.is_loopback
    assert [each for each in LOOPBACK + OF_NETWORKS if not hosts.allows(each)] == []
    # A name without a dot is of a network, too.
    assert [each for each in FOREIGN if hosts.allows(each)] == ["local."]
    assert hosts.allows(f"{socket.gethostname()}:8000")
    assert hosts.allows("my.name.example:1") == (bound == "my.name.example")


def test_names_can_be_added() -> None:
    hosts = Hosts("127.0.0.1", ["Octavo.example.com", ".corp.example", "192.168.0.7"])
    for header in ("octavo.example.com:8000", "OCTAVO.example.com", "corp.example", "a.b.corp.example"):
        assert hosts.allows(header)
    assert hosts.allows("192.168.0.7:1")
    for header in ("a.octavo.example.com", "evilcorp.example", "example.com", "192.168.0.70"):
        assert not hosts.allows(header)
    assert all(map(Hosts("127.0.0.1", ["*"]).allows, FOREIGN))
    assert str(hosts) == "localhost and loopback addresses, octavo.example.com, .corp.example, 192.168.0.7"


def test_loopback() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "::1", "a.localhost")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "localhost.evil.example", "10.0.0.1")))
