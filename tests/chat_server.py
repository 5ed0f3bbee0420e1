"""A chat server on loopback that says what a test tells it to, or misbehaves as it tells it to."""

import base64
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

MODEL = "judge"


@dataclass(frozen=True)
class Request:
    """One call of the chat completions API."""

    body: Mapping[str, Any]
    number: int
    """Requests that came before it."""

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        users = [m for m in self.body["messages"] if m["role"] == "user"]
        return list(users[-1]["content"])

    @property
    def text(self) -> str:
        return "".join(part.get("text", "") for part in self.parts)

    @property
    def pictures(self) -> list[np.ndarray]:
        """Decoded, in order, as uint8 (h, w, 3)."""
        urls = [part["image_url"]["url"] for part in self.parts if part["type"] == "image_url"]
        assert all(url.startswith("data:image/png;base64,") for url in urls)
        return [
            np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
            for url in urls
        ]


@dataclass(frozen=True)
class Reply:
    """What the server does with a request."""

    text: str | None = ""
    tokens: Sequence[tuple[str, Mapping[str, float]]] = ()
    finish: str = "stop"
    status: int = 200
    delay: float = 0.0
    raw: bytes | None = None
    """A body sent instead of a chat completion."""
    hang_up: bool = False
    """Close the connection without a word."""


@dataclass
class ChatServer:
    """`with ChatServer(answer) as server:`; `server.url` ends with /v1."""

    answer: Callable[[Request], Reply | str]
    models: Sequence[str] = (MODEL,)
    key: str | None = None
    requests: list[Request] = field(default_factory=list)
    most_at_once: int = 0

    def __enter__(self) -> "ChatServer":
        self._lock, self._now = threading.Lock(), 0
        self.start(0)
        return self

    def __exit__(self, *error: object) -> None:
        self.die()

    def start(self, port: int | None = None) -> None:
        """Listen; again at the same port after `die`."""
        chat = self

        class Handler(_Handler):
            server_of_test = chat

        address = ("127.0.0.1", self.port if port is None else port)
        self._http = _Server(address, Handler)
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.alive = True
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def die(self) -> None:
        """Stop listening and drop the connections that are open."""
        if self.alive:
            self.alive = False
            self._http.shutdown()
            self._http.server_close()
            self._http.drop()

    def handle(self, body: Mapping[str, Any]) -> Reply:
        with self._lock:
            request = Request(body, len(self.requests))
            self.requests.append(request)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            reply = self.answer(request)
            reply = Reply(reply) if isinstance(reply, str) else reply
            time.sleep(reply.delay)
            return reply
        finally:
            with self._lock:
                self._now -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 128

    def __init__(self, *args: Any):
        self.open: list[Any] = []
        super().__init__(*args)

    def get_request(self) -> Any:
        connection, address = super().get_request()
        self.open.append(connection)
        return connection, address

    def drop(self) -> None:
        for connection in self.open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *args: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of_test: ChatServer

    def do_GET(self) -> None:
        chat = self.server_of_test
        if chat.key and self.headers["Authorization"] != f"Bearer {chat.key}":
            self.send(401, b"{}")
        elif self.path == "/v1/models":
            self.send(200, json.dumps({"data": [{"id": name} for name in chat.models]}).encode())
        else:
            self.send(404, b"not here")

    def do_POST(self) -> None:
        chat = self.server_of_test
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        reply = chat.handle(body)
        if reply.hang_up or not chat.alive:
            self.close_connection = True
            self.connection.close()
            return
        self.send(reply.status, _completion(reply) if reply.raw is None else reply.raw)

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Silence."""


def _completion(reply: Reply) -> bytes:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": reply.text},
        "finish_reason": reply.finish,
    }
    if reply.tokens:
        content = [
            {
                "token": token,
                "logprob": likeliest.get(token, -99.0),
                "top_logprobs": [{"token": t, "logprob": p} for t, p in likeliest.items()],
            }
            for token, likeliest in reply.tokens
        ]
        choice["logprobs"] = {"content": content}
    return json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
