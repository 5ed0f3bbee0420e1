"""Open the socket that a server of rewards listens at."""

import socket


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address.

    Raises:
        ValueError: The address is not to be had.
    """
    try:
        kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host {host!r} is no address of this machine: {error}") from error
    listening = socket.socket(kind, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        raise ValueError(f"cannot serve on {host}, port {port}: {error.strerror}") from error
    return listening
