"""Options of a server: how a checkpoint is served, request limits, and its address; no torch."""

import errno
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field

from l2r.errors import InputError
from l2r.hf.checkpoints import Placement


@dataclass(frozen=True)
class ServeLimits:
    """Request limits: sizes, and timeouts in seconds.

    ``context`` is the number of tokens of prompt and answer together, at most the model's own.
    ``max_requests`` are in flight, ``max_connections`` open, ``max_choices`` are the answers of one
    request (its prompts times ``n``). ``max_unread`` are tokens of an answer that its client did
    not take: with more, and while others wait for their turn, the answer ends.
    """

    context: int = 2**20
    max_requests: int = 64
    max_connections: int = 256
    max_choices: int = 32
    header_timeout: float = 10  # until the header of a request is there
    body_timeout: float = 30  # until its body is
    write_timeout: float = 60  # until the client takes what was written
    max_unread: int = 64
    template_timeout: float = 5  # until a chat template has ended
    template_bytes: int = 2**30  # of memory of its process
    stall_timeout: float = 120  # of work without a token, after which /health says so

    @property
    def characters(self) -> int:
        """All prompts of a request together; more would be tokenized in vain."""
        return 16 * self.context

    @property
    def body(self) -> int:
        """Bytes: four for each character, and room for the other fields."""
        return 2**20 + 4 * self.characters


@dataclass(frozen=True)
class ServeOptions:
    """The way a checkpoint is served.

    ``name`` is the name of the model in requests, the folder's by default. ``num_blocks`` sizes
    the key-value cache of continuous batching, in blocks of 256 tokens. ``allowed_hosts`` are
    further names under which requests may come. ``trust_remote_code`` as for ``load_pretrained``.
    """

    name: str | None = None
    host: str = "localhost"
    port: int = 8000
    placement: Placement = field(default_factory=Placement)
    continuous_batching: bool = False
    num_blocks: int | None = None
    allowed_hosts: tuple[str, ...] = ()
    trust_remote_code: bool = False
    limits: ServeLimits = field(default_factory=ServeLimits)

    def __post_init__(self) -> None:
        if self.num_blocks is not None and not self.continuous_batching:
            raise InputError(
                f"num_blocks is for continuous batching; got num_blocks={self.num_blocks}"
            )


_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # of ::1 on a machine without IPv6


def check_address(host: str, port: int) -> None:
    """Raise as ``bound`` does, and let the port go again."""
    with ExitStack() as stack:
        bound(host, port, stack)


def bound(host: str, port: int, stack: ExitStack) -> list[socket.socket]:
    """Return a socket for each address of ``host``, all with one port (a free one for port 0).

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
