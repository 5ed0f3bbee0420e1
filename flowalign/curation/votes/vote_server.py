"""Serve the voting page, its samples and its votes, and the votes as a reward.

A page on another site cannot vote: its requests lack the JSON content type, or the browser asks
first, and this server does not answer such a question.
"""

import hmac
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from PIL import Image

from flowalign.curation.votes.poll import Poll, Task, measure_agreement
from flowalign.curation.votes.questions import Question
from flowalign.curation.votes.vote_reward import NAME, VoteReward
from flowalign.data.media.decode import MediaProblem, decode
from flowalign.data.media.media import Media
from flowalign.data.media.pixels import EXACT, MOST_FRAMES, UNKNOWN_RATE, encode_loop
from flowalign.data.preference.validate import Inspection
from flowalign.reports.pages import LocalHandler, LocalServer, render
from flowalign.rewards.batching import MIB, Limits, Refusal, check_content_type
from flowalign.rewards.protocol import VERSION, output_to_json, read_request, spec_to_json

_JSON, _HTML = "application/json", "text/html; charset=utf-8"
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


class VoteServer(LocalServer):
    """Server of a poll. With `token`, requests must carry it, in the address or as bearer token.

    Links in the folder `root` of the samples that lead out of it are not followed.
    """

    def __init__(
        self,
        poll: Poll,
        reward: VoteReward,
        host: str,
        port: int,
        root: Path,
        token: str | None = None,
    ):
        self.poll, self.reward, self.token, self.limits = poll, reward, token, Limits()
        self.root = root.absolute()
        super().__init__(host, port, _Handler)


class _Handler(LocalHandler):
    @property
    def _served(self) -> VoteServer:
        assert isinstance(self.server, VoteServer)
        return self.server

    def get(self, path: str, query: dict[str, list[str]]) -> None:
        """Answer with the page, the next question, a sample, or the declaration of the reward."""
        known = {
            "": self._page,
            "next": self._next,
            "media": self._media,
            "health": self._health,
            "spec": self._spec,
        }
        self._answer(known, path, query)

    def do_POST(self) -> None:  # noqa: N802 (name of the standard library)
        if not self.is_foreign():
            path, _, query = self.path.partition("?")
            known = {"vote": self._vote, "undo": self._undo, "score": self._score}
            self._answer(known, path, parse_qs(query))

    def _answer(
        self,
        known: Mapping[str, Callable[[list[str], dict[str, str]], None]],
        path: str,
        query: Mapping[str, Sequence[str]],
    ) -> None:
        """Answer with the function of the first part of the path, and explain errors."""
        asked = {name: values[-1] for name, values in query.items()}
        first, *parts = unquote(path).removeprefix("/").split("/")
        if not self._may_enter(asked):
            return self.send_error(HTTPStatus.UNAUTHORIZED, "a token is needed")
        if first not in known or (parts and first != "media"):
            return self.send_error(HTTPStatus.NOT_FOUND)
        try:
            return known[first](parts, asked)
        except (Refusal, OSError, ValueError, Image.DecompressionBombError) as error:
            status = error.status if isinstance(error, Refusal) else HTTPStatus.BAD_REQUEST
            status = HTTPStatus.INSUFFICIENT_STORAGE if isinstance(error, OSError) else status
            status = HTTPStatus.GATEWAY_TIMEOUT if isinstance(error, TimeoutError) else status
            return self.send_content(str(error).encode(), "text/plain", status=status)

    def _may_enter(self, asked: dict[str, str]) -> bool:
        sent = self.headers.get("Authorization", "").removeprefix("Bearer ") or asked.get("key", "")
        token = self._served.token
        return not token or hmac.compare_digest(sent.encode(), token.encode())

    def _page(self, _parts: list[str], _asked: dict[str, str]) -> None:
        page = render("vote.html.j2", settings=self._served.poll.settings)
        self.send_content(page.encode(), _HTML, "'self'")

    def _next(self, _parts: list[str], asked: dict[str, str]) -> None:
        annotator, poll, skip = asked.get("annotator", ""), self._served.poll, asked.get("skip", "")
        task = poll.next(annotator, int(skip) if skip.isdecimal() else 0)
        done, left = poll.count(annotator)
        agreement = {
            dim: {name: None if math.isnan(x) else round(x, 3) for name, x in one._asdict().items()}
            for dim, one in measure_agreement(poll).items()
        }
        question = task and _describe(task)
        self._json({"question": question, "done": done, "left": left, "agreement": agreement})

    def _health(self, _parts: list[str], _asked: dict[str, str]) -> None:
        self._json({"status": "ready", "models": {NAME: "ready"}, "reasons": {}})

    def _media(self, parts: list[str], _asked: dict[str, str]) -> None:
        question = self._served.poll.questions.get(parts[0] if parts else "")
        media = {} if question is None else _list_media(question)
        medium = media.get("/".join(parts[1:]))
        if medium is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        try:
            return self.send_content(*_show(medium, self._served.root))
        except (OSError, MediaProblem):
            return self.send_error(HTTPStatus.NOT_FOUND)

    def _vote(self, _parts: list[str], _asked: dict[str, str]) -> None:
        vote = self._read_json()
        seconds = vote.get("seconds")
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be a number of at least 0, got {seconds!r:.60}")
        names = str(vote.get("annotator", "")), str(vote.get("question", ""))
        self._served.poll.vote(*names, vote.get("answers"), float(seconds))
        self._json({"saved": True})

    def _undo(self, _parts: list[str], _asked: dict[str, str]) -> None:
        self._served.poll.undo(str(self._read_json().get("annotator", "")))
        self._json({"saved": True})

    def _spec(self, _parts: list[str], _asked: dict[str, str]) -> None:
        self._json({"version": VERSION, "models": [spec_to_json(self._served.reward.spec)]})

    def _score(self, _parts: list[str], _asked: dict[str, str]) -> None:
        limits, kind = self._served.limits, self.headers.get("Content-Type", "")
        check_content_type(kind)
        body = self._read(int(limits.max_request_mb * MIB))

        def check(shapes: Sequence[Sequence[int]]) -> None:
            limits.check_pixels(shapes)

        header, batch = read_request(body, kind, check)
        if header.get("model") not in (None, NAME):
            raise Refusal(404, f"no model {header['model']!r}; there is {NAME}")
        output = self._served.reward.score(batch, header.get("deadline_s") or limits.deadline)
        self._json(output_to_json(output))

    def _read_json(self) -> dict[str, Any]:
        if not self.headers.get("Content-Type", "").startswith(_JSON):
            raise Refusal(415, f"send {_JSON}")
        content = json.loads(self._read(_LONGEST_VOTE))
        if not isinstance(content, dict):
            raise ValueError("need a JSON object")
        return content

    def _read(self, most: int) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > most:
            raise Refusal(413, f"a request needs a Content-Length of at most {most}")
        return self.rfile.read(int(length))

    def _json(self, content: Any) -> None:
        self.send_content(json.dumps(content, allow_nan=False).encode(), _JSON)


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


def _show(medium: Media, root: Path) -> tuple[bytes, str]:
    """Return the content and the type of a sample for a browser.

    Raises:
        MediaProblem: The sample is no regular file, no image or video, or a link out of `root`.
    """
    path = Path(medium.path or "")
    is_inside = path.absolute().is_relative_to(root)
    if not path.is_file() or (is_inside and not path.resolve().is_relative_to(root.resolve())):
        raise MediaProblem(f"{path} is no regular file, or a link out of {root}")
    kind = _KINDS.get(path.suffix.lower(), "")
    if kind.startswith("image/") or _is_played(str(path)):
        content = path.read_bytes()
        if _SHOWN.match(content):
            return content, kind
    clip = decode(medium, MOST_FRAMES)
    return encode_loop(clip.pixels, clip.fps or UNKNOWN_RATE), "image/webp"
