"""Servers in pods: one socket for clusters of IPv4, IPv6 and both."""

from __future__ import annotations

import socket

import pytest

from leadline.protocol.listening import bound_socket, plain_address


def test_two_colons_are_reached_by_every_family_that_there_is(loopbacks: list[str]) -> None:
    for shared in (False, True):
        with bound_socket("::", 0, shared=shared) as bound:
            bound.listen()
            for host in loopbacks:
                with socket.create_connection((host.strip("[]"), bound.getsockname()[1]), 5):
                    peer, address = bound.accept()
                    peer.close()
                    assert plain_address(address[0]) == host.strip("[]")


def test_two_colons_without_ipv6_are_every_ipv4_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with bound_socket("::", 0) as bound:
        assert bound.family == socket.AF_INET
        assert bound.getsockname()[0] == "0.0.0.0"


def test_a_port_in_use_is_an_error() -> None:
    with bound_socket("127.0.0.1", 0) as one:
        one.listen()
        with pytest.raises(OSError, match="in use"):
            bound_socket("127.0.0.1", one.getsockname()[1])


@pytest.mark.parametrize(
    ("address", "plain"),
    [
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("10.0.0.7", "10.0.0.7"),
        ("fd00::7", "fd00::7"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("::1", "::1"),
    ],
)
def test_peers_have_one_name_whichever_socket_they_came_by(address: str, plain: str) -> None:
    assert plain_address(address) == plain
