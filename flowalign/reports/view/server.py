"""Serve the page about a folder of runs and its files, read-only."""

import contextlib
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote

from flowalign.reports.local_server import LocalHandler, LocalServer
from flowalign.reports.view.page import page
from flowalign.reports.view.runs import RunReader, within

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


class ViewServer(LocalServer):
    """Server of the runs below a folder."""

    def __init__(self, root: Path, host: str, port: int, every: float):
        self.reader, self.every = RunReader(root), every
        super().__init__(host, port, _ViewHandler)


class _ViewHandler(LocalHandler):
    @property
    def _view(self) -> ViewServer:
        assert isinstance(self.server, ViewServer)
        return self.server

    def get(self, path: str, query: dict[str, list[str]]) -> None:
        """Answer with the page or a file."""
        if path == "/":
            return self._page(query.get("run", []), "more" in query)
        if path.startswith("/files/"):
            return self._file(unquote(path.removeprefix("/files/")))
        return self.send_error(HTTPStatus.NOT_FOUND)

    def _page(self, wanted: list[str], more: bool) -> None:
        reader = self._view.reader
        content = page(reader.root.name, reader.read(), wanted, more, self._view.every)
        self.send_content(content.encode(), _KINDS[".html"], "'self'")

    def _file(self, name: str) -> None:
        content = read_file(self._view.reader.root, name)
        if content is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        return self.send_content(content, _KINDS[Path(name).suffix])


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
