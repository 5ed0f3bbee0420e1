"""Serve rewards over HTTP: /health, /spec and /score."""

import asyncio
from typing import Any

from flowalign.rewards.limits import MIB, RETRY_AFTER_S, Held, Limits, Refused
from flowalign.rewards.server import Service


def needs_http() -> None:
    """Raise ValueError if the libraries of the server are not installed."""
    try:
        import fastapi  # noqa: F401
        import httptools  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError("serving needs fastapi: pip install 'flowalign[serve]'") from error


def server(service: Service):
    """Build the uvicorn server of a service; raises ValueError if a library is not installed."""
    needs_http()
    import uvicorn

    from flowalign.rewards.timed_protocol import TimedProtocol

    limits = service.limits
    return uvicorn.Server(
        uvicorn.Config(
            application(service),
            http=TimedProtocol.of(limits.read_timeout),
            timeout_keep_alive=round(limits.read_timeout) or 1,
            log_level="warning",
            access_log=False,
        )
    )


def application(service: Service):
    """Build the HTTP application."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response

    app = FastAPI(title="flowalign rewards", docs_url=None, redoc_url=None, openapi_url=None)

    def refused(_: Request, error: Exception) -> JSONResponse:
        status = error.status if isinstance(error, Refused) else 500
        headers = {503: {"retry-after": str(RETRY_AFTER_S)}, 408: {"connection": "close"}}
        return JSONResponse({"error": str(error)}, status, headers.get(status))

    app.add_exception_handler(Refused, refused)

    @app.get("/health")
    async def health() -> JSONResponse:
        state = service.health()
        return JSONResponse(state, 200 if state["status"] == "ready" else 503)

    @app.get("/spec")
    async def spec(request: Request) -> JSONResponse:
        service.check_token(request.headers.get("authorization"))
        return JSONResponse(service.specs())

    @app.post("/score")
    async def score(request: Request) -> Response:
        service.check_token(request.headers.get("authorization"))
        kind = request.headers.get("content-type", "")
        with service.room.hold() as held:
            body = await _body(request, service.limits, held)
            answer = await service.score(body, kind, held)
        return Response(answer, media_type="application/json")

    return app


async def _body(request: Any, limits: Limits, held: Held) -> bytes:
    """Read the body of a request; raises Refused if it is too large, too slow or incomplete."""
    from starlette.requests import ClientDisconnect

    most = int(limits.max_request_mb * MIB)
    body, declared = bytearray(), request.headers.get("content-length", "0")
    if int(declared) > most:
        raise Refused(413, f"a request may have {limits.max_request_mb:g} MB")
    try:
        async with asyncio.timeout(limits.read_timeout):
            async for chunk in request.stream():
                if len(body) + len(chunk) > most:
                    raise Refused(413, f"a request may have {limits.max_request_mb:g} MB")
                held.add(len(chunk))
                body += chunk
    except TimeoutError as error:
        raise Refused(408, f"not received within {limits.read_timeout:g} seconds") from error
    except ClientDisconnect as error:
        raise Refused(400, "the client left") from error
    return bytes(body)
