"""The socket of a server. `::` means every address of both families, as pods of IPv4, IPv6 and dual-stack
clusters need it."""

from __future__ import annotations

import resource
import socket

__all__ = ["bound_socket", "plain_address", "use_many_descriptors"]

_DESCRIPTORS = 1 << 16


def bound_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bound, not listening yet. `::` takes IPv4 too, whatever the machine's default is, and is 0.0.0.0 where
    the kernel has no IPv6. `shared`: others may bind the port beside it (SO_REUSEPORT). Raises OSError."""
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, proto)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if host == "::":
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def plain_address(address: str) -> str:
    """A peer's address as it is written elsewhere: an IPv4 peer of a socket for both families is
    ::ffff:10.0.0.7 there."""
    return address.removeprefix("::ffff:") if "." in address else address


def use_many_descriptors() -> None:
    """Raise this process's limit of open files, and that of the processes it starts, as far as it may. The
    usual 1,024 is there for programs that use select(); a server needs one or two for each connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
