"""Serve pages of this machine: checks of the host name, security headers, and no log."""

import sys
from abc import ABC, abstractmethod
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

from flowalign.utils.hosts import is_foreign

_POLICY = (
    "default-src 'none'; img-src 'self' data:; media-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src {connect}; base-uri 'none'; form-action 'self'"
)


class LocalServer(ThreadingHTTPServer):
    """Threaded server of pages."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type["LocalHandler"]):
        self.host = host
        super().__init__((host, port), handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a browser that disconnected; print any other error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]


class LocalHandler(BaseHTTPRequestHandler, ABC):
    """Handler of a `LocalServer`; subclasses answer with `get`."""

    @abstractmethod
    def get(self, path: str, query: dict[str, list[str]]) -> None:
        """Answer a GET or HEAD request from this machine."""

    def do_GET(self) -> None:
        """Answer a request, unless it names another host."""
        if not self.is_foreign():
            path, _, query = self.path.partition("?")
            self.get(path, parse_qs(query))

    def do_HEAD(self) -> None:
        """Answer like GET, without content."""
        self.do_GET()

    def is_foreign(self) -> bool:
        """Return whether the request names another host or none, and answer it with 403 if so."""
        assert isinstance(self.server, LocalServer)
        foreign = is_foreign(self.headers.get("Host"), self.server.host)
        if foreign:
            self.send_error(HTTPStatus.FORBIDDEN)
        return foreign

    def send_content(
        self, content: bytes, kind: str, connect: str = "'none'", status: int = HTTPStatus.OK
    ) -> None:
        """Answer with content of a type; `connect` is the address that its scripts may read."""
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-cache",
            "Content-Security-Policy": _POLICY.format(connect=connect),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, since pages ask every few seconds."""
