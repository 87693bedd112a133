"""A port that several processes share, held for them before the first of them listens."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from decideonce_server.settings import address


@contextmanager
def reserved_port(listen: str) -> Iterator[int]:
    """Hold an address's port for processes that share it with SO_REUSEPORT, and give its number; 0 takes a free one.

    Raises:
        OSError: it can't be had, or somebody else listens there: sharing with strangers would share their calls.
    """
    host, port = address(listen, "--listen")
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        if port:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        holder = socket.socket(family, kind)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(where)
    except OSError as error:
        raise OSError(f"--listen {listen} can't be had: {error.strerror}") from None
    with holder:
        yield holder.getsockname()[1]
