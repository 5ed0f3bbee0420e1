"""Serve rewards over HTTP: /health, /spec and /score."""

from flowalign.rewards.server import Refused, Service


def application(service: Service):
    """Build the HTTP application; raises ValueError if its libraries are not installed."""
    try:
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse
    except ImportError as error:
        raise ValueError("serving needs fastapi: pip install 'flowalign[serve]'") from error

    app = FastAPI(title="flowalign rewards", docs_url=None, redoc_url=None, openapi_url=None)
    most = int(service.limits.max_request_mb * 2**20)

    def refused(_: Request, error: Exception) -> JSONResponse:
        status = error.status if isinstance(error, Refused) else 500
        return JSONResponse({"error": str(error)}, status)

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
    async def score(request: Request) -> JSONResponse:
        service.check_token(request.headers.get("authorization"))
        chunks, size = [], 0
        async for chunk in request.stream():
            chunks.append(chunk)
            size += len(chunk)
            if size > most:
                raise Refused(413, f"a request may have {service.limits.max_request_mb:g} MB")
        kind = request.headers.get("content-type", "")
        return JSONResponse(await service.score(b"".join(chunks), kind))

    return app
