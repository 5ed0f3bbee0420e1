"""Serve the voting page, its samples and its votes, and the votes as a reward.

A page on another site cannot vote: its requests lack the JSON content type, or the browser asks
first, and this server does not answer such a question.
"""

import math
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from flowalign.curation.votes.poll import Poll, Task, measure_agreement
from flowalign.curation.votes.questions import Question
from flowalign.data.preference.validate import Inspection
from flowalign.reports.pages import render
from flowalign.rewards.batching import Refusal
from flowalign.rewards.reward_server import Service, application, receive
from flowalign.utils.files import parse_json
from flowalign.utils.media.decode import decode
from flowalign.utils.media.media import Media, MediaProblem
from flowalign.utils.media.pixels import EXACT, MOST_FRAMES, UNKNOWN_RATE, encode_loop

HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; img-src 'self' data:; media-src 'self'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Headers of every answer."""
_KINDS = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
}
"""Content types of files that browsers show; other samples are decoded first."""
_SHOWN = re.compile(rb"(?s)\x89PNG|\xff\xd8\xff|GIF8|RIFF....WEBP|....ftyp|\x1a\x45\xdf\xa3")
"""First bytes of these files."""
_LONGEST_VOTE = 100_000


def vote_application(poll: Poll, service: Service, host: str, root: Path) -> FastAPI:
    """Build the application of a poll, which also serves its votes as a reward.

    If the service has a token, requests must carry it, in the address or as bearer token. Links in
    the folder `root` of the samples that lead out of it are not followed.
    """

    def check_key(request: Request, key: str = "") -> None:
        service.check_token(request.headers.get("authorization", key))

    pages = APIRouter(dependencies=[Depends(check_key)])

    @pages.get("/")
    def page() -> Response:
        return HTMLResponse(render("vote.html.j2", settings=poll.settings))

    @pages.get("/next")
    def find_next(annotator: str = "", skip: int = 0) -> dict[str, Any]:
        return _describe_state(poll, annotator, skip)

    @pages.get("/media/{question}/{name:path}")
    def send_media(question: str, name: str) -> Response:
        with suppress(KeyError):
            return _show(_list_media(poll.questions[question])[name], root.absolute())
        return Response(status_code=404)

    @pages.post("/vote")
    async def vote(request: Request) -> JSONResponse:
        return await _store(partial(_vote, poll), request, service.limits.read_timeout)

    @pages.post("/undo")
    async def undo(request: Request) -> JSONResponse:
        return await _store(partial(_undo, poll), request, service.limits.read_timeout)

    app = application(service, host)
    app.include_router(pages)
    return app


async def _store(
    store: Callable[[dict[str, Any]], None], request: Request, seconds: float
) -> JSONResponse:
    """Pass the object that the page sends to `store`; raise Refusal for any other request."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise Refusal(415, "send application/json")
    try:
        content = parse_json(await receive(request, _LONGEST_VOTE, seconds))
        if not isinstance(content, dict):
            raise ValueError("need a JSON object")
        await run_in_threadpool(store, content)
    except ValueError as error:
        raise Refusal(400, str(error)) from error
    except OSError as error:
        raise Refusal(507, str(error)) from error
    return JSONResponse({"saved": True})


def _vote(poll: Poll, vote: dict[str, Any]) -> None:
    seconds = vote.get("seconds")
    if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(f"seconds must be a number of at least 0, got {seconds!r:.60}")
    names = str(vote.get("annotator", "")), str(vote.get("question", ""))
    poll.vote(*names, vote.get("answers"), float(seconds))


def _undo(poll: Poll, vote: dict[str, Any]) -> None:
    poll.undo(str(vote.get("annotator", "")))


def _describe_state(poll: Poll, annotator: str, skip: int) -> dict[str, Any]:
    """Return the next question of an annotator, and the progress and agreement of the poll."""
    task = poll.next(annotator, skip)
    done, left = poll.count(annotator)
    agreement = {
        dim: {name: None if math.isnan(x) else round(x, 3) for name, x in one._asdict().items()}
        for dim, one in measure_agreement(poll).items()
    }
    question = task and _describe(task)
    return {"question": question, "done": done, "left": left, "agreement": agreement}


def _list_media(question: Question) -> dict[str, Media]:
    """Return the samples and references of a question by the end of their address."""
    found = {str(i): medium for i, medium in enumerate(question.candidates)}
    return found | {f"source/{i}": medium for i, medium in enumerate(question.references)}


def _describe(task: Task) -> dict[str, Any]:
    """Return a task for the script of the page."""
    question = task.question
    media = _list_media(question)

    def shown(name: str) -> dict[str, Any]:
        played = _is_played(media[name].path or "")
        return {"address": f"/media/{quote(question.id)}/{name}", "video": played}

    return {
        "id": question.id,
        "prompt": question.prompt,
        "sources": [shown(name) for name in media if name.startswith("source/")],
        "candidates": [shown(str(i)) | {"index": i} for i in task.order],
        "repeat": task.repeat,
    }


@cache
def _is_played(path: str) -> bool:
    """Return whether browsers play a clip; small ones have full colour resolution, which few do."""
    kind = _KINDS.get(Path(path).suffix.lower(), "") if Path(path).is_file() else ""
    return kind.startswith("video/") and max(Inspection().shape(Media(path))[:2]) > EXACT


def _show(medium: Media, root: Path) -> Response:
    """Return a sample for a browser.

    The status is 404 if it is no regular file, no image or video, or a link out of `root`.
    """
    path = Path(medium.path or "")
    is_inside = path.absolute().is_relative_to(root)
    if not path.is_file() or (is_inside and not path.resolve().is_relative_to(root.resolve())):
        return Response(status_code=404)
    kind = _KINDS.get(path.suffix.lower(), "")
    try:
        if kind.startswith("image/") or _is_played(str(path)):
            content = path.read_bytes()
            if _SHOWN.match(content):
                return Response(content, media_type=kind)
        clip = decode(medium, MOST_FRAMES)
    except (OSError, MediaProblem):
        return Response(status_code=404)
    loop = encode_loop(clip.pixels, clip.fps or UNKNOWN_RATE)
    return Response(loop, media_type="image/webp")
