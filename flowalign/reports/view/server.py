"""Serve the page about a folder of runs and its files, read-only."""

import contextlib
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

from flowalign.reports.view.page import page
from flowalign.reports.view.runs import Reader, within

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".png": "image/png",
    ".webp": "image/webp",
    ".txt": "text/plain; charset=utf-8",
    ".yaml": "text/plain; charset=utf-8",
    ".json": "text/plain; charset=utf-8",
    ".jsonl": "text/plain; charset=utf-8",
    ".log": "text/plain; charset=utf-8",
}
"""Content types of the files that are served; other files, such as weights, are not."""
_POLICY = (
    "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src {connect}; base-uri 'none'; form-action 'self'"
)


class Server(ThreadingHTTPServer):
    """Server of the runs below a folder.

    With `names`, requests with another host name are refused. On the loopback address, they come
    from a foreign page that uses DNS rebinding.
    """

    daemon_threads = True

    def __init__(self, root: Path, host: str, port: int, every: float, names: tuple[str, ...] = ()):
        self.reader, self.every, self.names = Reader(root), every, names
        super().__init__((host, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a browser that disconnected; print any other error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]


class _Handler(BaseHTTPRequestHandler):
    @property
    def _view(self) -> Server:
        assert isinstance(self.server, Server)
        return self.server

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").lower().rpartition(":")[0].strip("[]")
        # DNS rebinding: a foreign page may resolve its own name to the loopback address.
        if self._view.names and host not in self._view.names:
            return self.send_error(HTTPStatus.FORBIDDEN)
        path, _, query = self.path.partition("?")
        if path == "/":
            asked = parse_qs(query)
            return self._page(asked.get("run", []), "more" in asked)
        if path.startswith("/files/"):
            return self._file(unquote(path.removeprefix("/files/")))
        return self.send_error(HTTPStatus.NOT_FOUND)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _page(self, wanted: list[str], more: bool) -> None:
        reader = self._view.reader
        content = page(reader.root.name, reader.read(), wanted, more, self._view.every)
        self._send(content.encode(), _KINDS[".html"], "'self'")

    def _file(self, name: str) -> None:
        content = read_file(self._view.reader.root, name)
        if content is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        return self._send(content, _KINDS[Path(name).suffix], "'none'")

    def _send(self, content: bytes, kind: str, connect: str) -> None:
        self.send_response(HTTPStatus.OK)
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
        """Log nothing, since the page reloads every few seconds."""


def read_file(root: Path, name: str) -> bytes | None:
    """Return a file below the folder; None if it is missing, hidden, of another type or outside.

    The target of a link that leads outside counts as outside.
    """
    parts = name.split("/")
    if Path(name).suffix not in _KINDS or any(part[:1] in ("", ".") for part in parts):
        return None
    if "\0" in name or "\\" in name:
        return None
    with contextlib.suppress(OSError, RuntimeError):  # deleted since, or circular links
        real = within(root, root / name)
        return real.read_bytes() if real and real.is_file() else None
    return None
