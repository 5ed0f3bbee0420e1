"""Tell the addresses of this machine from others, and refuse requests of foreign pages."""

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_foreign(header: str | None, bound: str) -> bool:
    """Return whether a request to a server at the address `bound` must be refused for its `Host`.

    A page of another site may resolve its own name to the loopback address (DNS rebinding), so a
    server there accepts loopback names only. Other addresses have names that the server cannot
    know, and need a token, which a foreign page does not have.
    """
    try:
        host = urlsplit(f"//{header or ''}").hostname
    except ValueError:  # no valid address
        host = None
    return not host or (is_loopback(bound) and not is_loopback(host))
