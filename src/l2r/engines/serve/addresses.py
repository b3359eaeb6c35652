"""Sockets of a host and a port, before a model is loaded for them."""

import errno
import socket
from contextlib import ExitStack

from l2r.errors import InputError

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # of ::1 on a machine without IPv6


def check_address(host: str, port: int) -> None:
    """Raise as ``bound`` does, and let the port go again."""
    with ExitStack() as stack:
        bound(host, port, stack)


def bound(host: str, port: int, stack: ExitStack) -> list[socket.socket]:
    """A socket for each address of ``host``, all with one port (a free one for port 0).

    Raises ValueError for a host of elsewhere, and where the port cannot be had.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InputError(f"host must be an address of this machine; got {host!r}") from error
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, address in addresses:
        one = stack.enter_context(socket.socket(family, kind, protocol))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        at = sockets[0].getsockname()[1] if sockets else port
        try:
            one.bind((address[0], at, *address[2:]))
        except OSError as error:
            if error.errno not in _NOT_HERE:
                reason = f"cannot listen on {host}, port {at}: {error.strerror}"
                raise InputError(reason) from error
        else:
            sockets.append(one)
    if not sockets:
        raise InputError(f"host must be an address of this machine; got {host!r}")
    return sockets
