"""Serve reward models over HTTP: /health, /spec and /score. Needs `flowalign-diffusion[serve]`."""

import asyncio
import hmac
import json
import math
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from PIL import Image
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from flowalign.rewards.batching import (
    MIB,
    Batcher,
    Limits,
    Queue,
    Refusal,
    Room,
    check_content_type,
)
from flowalign.rewards.protocol import VERSION, output_to_json, read_request, spec_to_json
from flowalign.types import MediaBatch, RewardModel
from flowalign.utils.console import say
from flowalign.utils.errors import explain_errors
from flowalign.utils.hosts import is_foreign

RETRY_AFTER_S = 1
"""Seconds until a client should retry after status 503."""
_NEEDS_TOKEN = "a token is needed: send it as 'Authorization: Bearer TOKEN'; RemoteReward reads it "
_NEEDS_TOKEN += "from the environment variable FLOWALIGN_REWARD_TOKEN"
_PATH = re.compile(r"(?<![\w.:/])/(?:[^\s/'\"(),]+/)+([^\s/'\"(),]*)")
_MOST_CONNECTIONS = 128
"""Number of connections above which idle ones are closed."""
REMEMBERED = 256
"""Number of answers in the cache, for requests that are sent again with the same id."""


class Service:
    """Rewards of a server, with their queues and a cache of answers."""

    def __init__(self, queues: Sequence[Queue], limits: Limits, token: str | None = None):
        self.queues = {queue.spec.name: queue for queue in queues}
        self.limits, self.token, self.room = limits, token, Room(limits)
        self.answers: dict[str, asyncio.Task[bytes]] = {}

    def health(self) -> dict[str, Any]:
        """Return the state of each model (`ready`, `loading` or `failed`) and the worst state."""
        models = {name: queue.state for name, queue in self.queues.items()}
        reasons = {name: shorten_paths(q.failure) for name, q in self.queues.items() if q.failure}
        worst = max(models.values(), key=("ready", "loading", "failed").index)
        return {"status": worst, "models": models, "reasons": reasons}

    def specs(self) -> dict[str, Any]:
        """Return the protocol version, and the spec and fingerprint of each model."""
        models = [spec_to_json(queue.spec) for queue in self.queues.values()]
        return {"version": VERSION, "models": models}

    def check_token(self, header: str) -> None:
        """Raise Refusal unless the header carries the token."""
        sent = header.removeprefix("Bearer ")
        if self.token and not hmac.compare_digest(sent.encode(), self.token.encode()):
            raise Refusal(401, _NEEDS_TOKEN)

    async def score(self, body: bytes, content_type: str, hold: Callable[[int], None]) -> bytes:
        """Answer a request; a repeated request gets the same answer without new scoring."""
        start = time.monotonic()

        def reserve(shapes: Sequence[Sequence[int]]) -> None:
            # safetensors copies the message, and the decoded pixels need memory as well.
            hold(len(body) + self.limits.check_pixels(shapes))

        try:  # in a thread, because decoding would block other requests
            header, batch = await asyncio.to_thread(read_request, body, content_type, reserve)
        except Image.DecompressionBombError as error:
            raise Refusal(413, str(error)) from error
        except ValueError as error:
            raise Refusal(400, str(error)) from error
        seconds = min(header.get("deadline_s") or self.limits.deadline, self.limits.deadline)
        key, model = header.get("request_id"), header.get("model")
        if key is None:
            return await self._answer(model, batch, start, seconds)
        if key not in self.answers:
            answer = asyncio.create_task(self._answer(model, batch, start, seconds))
            self.answers[key] = answer
            if len(self.answers) > REMEMBERED:
                del self.answers[next(iter(self.answers))]
        try:
            return await asyncio.shield(self.answers[key])
        except Refusal:
            self.answers.pop(key, None)  # failures are not cached
            raise

    async def _answer(
        self, model: str | None, batch: MediaBatch, start: float, seconds: float
    ) -> bytes:
        if model is None and len(self.queues) == 1:
            (model,) = self.queues
        if model not in self.queues:
            raise Refusal(404, f"no model {model!r}; there are {', '.join(self.queues)}")
        queue, frames = self.queues[model], batch.media.shape[1]
        if queue.spec.modality == "image" and frames > 1:
            raise Refusal(422, f"{model} scores images, got videos of {frames} frames")
        try:
            async with asyncio.timeout(start + seconds - time.monotonic()):
                output = await asyncio.wrap_future(queue.submit(batch, start + seconds))
        except TimeoutError as error:
            raise Refusal(504, f"{queue.late} within {seconds:g} seconds") from error
        except RuntimeError as error:
            mistake = error.__cause__
            if isinstance(mistake, ValueError):
                raise Refusal(422, str(mistake)) from error
            say(f"error: {error}")  # the log keeps paths that answers to clients omit
            raise Refusal(500, str(error)) from error
        refuse = partial(Refusal, 500)
        with explain_errors("extras of the reward are not JSON", TypeError, ValueError, to=refuse):
            return json.dumps(output_to_json(output), allow_nan=False).encode()


def shorten_paths(text: str) -> str:
    """Return a message in which only the last part of each absolute path is left."""
    return _PATH.sub(r"\1", text)


async def receive(
    request: Request, most: int, seconds: float, hold: Callable[[int], None] = lambda _: None
) -> bytes:
    """Return the body of a request; raise Refusal if it is large, slow or incomplete."""
    body = bytearray()
    too_large = Refusal(413, f"a request may have {most / MIB:g} MB")
    if int(request.headers.get("content-length", "0")) > most:
        raise too_large
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                if len(body) + len(chunk) > most:
                    raise too_large
                hold(len(chunk))
                body += chunk
    except TimeoutError as error:
        raise Refusal(408, f"not received within {seconds:g} seconds") from error
    except ClientDisconnect as error:
        raise Refusal(400, "the client left") from error
    return bytes(body)


def application(service: Service, host: str = "127.0.0.1") -> FastAPI:
    """Build the HTTP application of a server at the address `host`."""

    async def check_host(request: Request) -> None:
        if is_foreign(request.headers.get("host"), host):
            raise Refusal(403, "the Host header names another machine, or none")
        origin = request.headers.get("origin")
        if origin is not None and is_foreign(origin.partition("://")[2], host):
            raise Refusal(403, "the Origin header names a page of another site")

    checks = [Depends(check_host)]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=checks)

    @app.exception_handler(Refusal)
    async def refuse(_: Request, error: Refusal) -> JSONResponse:
        headers = {503: {"retry-after": str(RETRY_AFTER_S)}, 408: {"connection": "close"}}
        return JSONResponse(
            {"error": shorten_paths(str(error))}, error.status, headers.get(error.status)
        )

    @app.get("/health")
    async def health() -> JSONResponse:
        state = service.health()
        return JSONResponse(state, 200 if state["status"] == "ready" else 503)

    @app.get("/spec")
    async def spec(request: Request) -> JSONResponse:
        service.check_token(request.headers.get("authorization", ""))
        return JSONResponse(service.specs())

    @app.post("/score")
    async def score(request: Request) -> Response:
        service.check_token(request.headers.get("authorization", ""))
        kind, limits = request.headers.get("content-type", ""), service.limits
        check_content_type(kind)
        with service.room.admit() as hold:
            most = int(limits.max_request_mb * MIB)
            body = await receive(request, most, limits.read_timeout, hold)
            answer = await service.score(body, kind, hold)
        return Response(answer, media_type="application/json")

    return app


class HeadTimeout(HttpToolsProtocol):
    """HTTP connection that is closed if no complete request header arrives in time.

    uvicorn closes connections that are idle after an answer, but waits forever for a first request
    and for the rest of a header. Of many connections the one that is idle for the longest time is
    closed at once, because each is an open file.
    """

    def __init__(self, *args: Any, seconds: float, **settings: Any):
        super().__init__(*args, **settings)
        self._seconds, self._used = seconds, 0.0

    def connection_made(self, transport: Any) -> None:
        """Start to check every `seconds` whether another request has arrived."""
        super().connection_made(transport)
        self._used = self.loop.time()
        self.loop.call_later(self._seconds, self._check, None)
        others = (one for one in self.connections if isinstance(one, HeadTimeout))
        idle = [one for one in others if one.is_idle and not one.transport.is_closing()]
        if len(self.connections) > _MOST_CONNECTIONS and idle:
            min(idle, key=lambda one: one._used).transport.close()

    @property
    def is_idle(self) -> bool:
        """Whether the connection has no complete request header that waits for an answer."""
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        """Note the time of the last answer."""
        self._used = self.loop.time()
        super().on_response_complete()

    def _check(self, last: object) -> None:
        if self.is_idle and self.cycle is last:
            self.transport.close()
        if not self.transport.is_closing():
            self.loop.call_later(self._seconds, self._check, self.cycle)


def start_queues(models: Sequence[RewardModel], limits: Limits) -> list[Queue]:
    """Start a queue for each model; raise ValueError for models that cannot be served."""
    names = [model.spec.name for model in models]
    if len(set(names)) < len(names):
        raise ValueError(f"two models are both named {max(names, key=names.count)!r}")
    if deaf := [model.spec.name for model in models if "sound" in model.spec.needs]:
        remedy = "which requests cannot hold: use it without a server"
        raise ValueError(f"reward {deaf[0]!r} scores sound, {remedy}")
    return [Batcher(model, limits) for model in models]


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; raise ValueError if it is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"cannot serve on host {host!r}, port {port}: {error}; "
            "choose another --host, or --port 0 for any free port"
        ) from error


def build_server(
    app: FastAPI, read_timeout: float, headers: Mapping[str, str] | None = None
) -> uvicorn.Server:
    """Build the uvicorn server of an application, which waits `read_timeout` s for requests.

    `headers` are added to every answer.
    """
    config = uvicorn.Config(
        app,
        http=partial(HeadTimeout, seconds=read_timeout),  # type: ignore[arg-type]
        timeout_keep_alive=math.ceil(read_timeout),
        headers=list((headers or {}).items()),
        log_level="warning",
        access_log=False,
    )
    return uvicorn.Server(config)
