"""Serves reward models: checks requests, hands them to the models, and remembers answers."""

import asyncio
import hmac
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar

from flowalign.rewards.batching import Batcher
from flowalign.rewards.limits import Held, Limits, Refused, Room
from flowalign.rewards.protocol import VERSION, output_to_json
from flowalign.rewards.requests import Request, read_request
from flowalign.types import RewardModel

T = TypeVar("T")

REMEMBERED = 256
"""Number of requests whose answer is kept, in case their id is sent again."""
DECODERS = 2
"""Number of threads that read requests and decode pixels."""
AT_ONCE = 1 << 18
"""Bytes up to which that is done at once, because a thread would take longer to begin."""


class Service:
    """Answers the requests of a server, independently of HTTP."""

    def __init__(self, models: Sequence[RewardModel], limits: Limits, token: str | None = None):
        names = [model.spec.name for model in models]
        if len(set(names)) < len(names):
            raise ValueError(f"two models are both named {max(names, key=names.count)!r}")
        self.batchers = {model.spec.name: Batcher(model, limits) for model in models}
        self.limits, self.token, self.room = limits, token, Room(limits)
        self.decoders = ThreadPoolExecutor(DECODERS, "decode")
        self.answers: OrderedDict[str, asyncio.Future[bytes]] = OrderedDict()

    def health(self) -> dict[str, Any]:
        """Return `ready`, `loading` or `failed` of each model, and the worst of them as status."""
        models = {name: batcher.state for name, batcher in self.batchers.items()}
        reasons = {name: b.failure for name, b in self.batchers.items() if b.failure}
        worst = max(models.values(), key=("ready", "loading", "failed").index)
        return {"status": worst, "models": models, "reasons": reasons}

    def specs(self) -> dict[str, Any]:
        """Return the version of the protocol, and each model's spec with its fingerprint."""
        models = [batcher.model.spec for batcher in self.batchers.values()]
        rows = [asdict(spec) | {"fingerprint": spec.fingerprint()} for spec in models]
        return {"version": VERSION, "models": _plain(rows)}

    def check_token(self, header: str | None) -> None:
        """Raise Refused unless the header carries the token."""
        given = (header or "").removeprefix("Bearer ")
        if self.token and not hmac.compare_digest(given.encode(), self.token.encode()):
            raise Refused(401, "a token is needed: send it as 'Authorization: Bearer TOKEN'")

    async def score(self, body: bytes, content_type: str, held: Held) -> bytes:
        """Answer a request; one that was sent before gets the same answer without new scoring."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(self.limits.deadline):
                request = await self._aside(
                    len(body), read_request, body, content_type, self.limits
                )
        except TimeoutError as error:
            raise Refused(504, f"not read within {self.limits.deadline:g} seconds") from error
        except ValueError as error:
            raise Refused(400, str(error)) from error
        key = request.request_id
        if key is None:
            return await self._answer(request, start, held)
        if key not in self.answers:
            self.answers[key] = asyncio.ensure_future(self._answer(request, start, held))
            while len(self.answers) > REMEMBERED:
                self.answers.popitem(last=False)
        answer = self.answers[key]
        try:
            return await asyncio.shield(answer)
        except Refused:
            if self.answers.get(key) is answer:  # a failure is not remembered
                del self.answers[key]
            raise

    async def _answer(self, request: Request, start: float, held: Held) -> bytes:
        batcher, until = self._batcher(request.model), start + request.deadline
        held.add(request.size)
        try:
            async with asyncio.timeout(until - time.monotonic()):
                batch = await self._aside(request.size, _decoded, request)
                output = await asyncio.wrap_future(batcher.submit(batch, until))
        except TimeoutError as error:
            raise Refused(504, f"not scored within {request.deadline:g} seconds") from error
        except RuntimeError as error:
            mistake = error.__cause__
            if isinstance(mistake, ValueError):
                raise Refused(422, str(mistake)) from error
            raise Refused(500, str(error)) from error
        try:
            return json.dumps(output_to_json(output), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise Refused(500, f"extras of the reward are not JSON: {error}") from error

    async def _aside(self, size: int, work: Callable[..., T], *given: Any) -> T:
        """Return the result of work, which must not hold up everyone if it is large."""
        if size <= AT_ONCE:
            return work(*given)
        return await asyncio.get_running_loop().run_in_executor(self.decoders, work, *given)

    def _batcher(self, name: str | None) -> Batcher:
        if name is None and len(self.batchers) == 1:
            batcher = next(iter(self.batchers.values()))
        elif name is not None and name in self.batchers:
            batcher = self.batchers[name]
        else:
            raise Refused(404, f"no model {name!r}; there are {', '.join(self.batchers)}")
        if batcher.failure:
            raise Refused(500, batcher.failure)
        return batcher


def _decoded(request: Request):
    try:
        return request.decode()
    except ValueError as error:
        raise Refused(400, str(error)) from error


def _plain(value: Any) -> Any:
    """Replace the infinite bounds of scales by null, since JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and value in (float("inf"), -float("inf")) else value
