"""Implements a client of OpenAI-compatible chat servers: vLLM, sglang, `transformers serve`."""

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import httpx2
from anyio.from_thread import start_blocking_portal

from flowalign.rewards.reward_client import read_retry_after
from flowalign.types import NonNegativeFloat, PositiveFloat, PositiveInt, require_ranges
from flowalign.utils.errors import require_known
from flowalign.utils.files import parse_json
from reward_models.chat.guards import AnswerCache, ChatError, CircuitBreaker, ServerDown

T = TypeVar("T")


Messages = Sequence[Mapping[str, Any]]
"""Conversation in the format of the chat completions API."""

_LONGEST_DELAY = 20.0


@dataclass(frozen=True)
class Server:
    """Address of a served judge, with the limits on requests to it."""

    url: str
    """URL up to and including the version, such as http://127.0.0.1:8000/v1."""
    model: str
    """Name under which the server offers the model."""
    key_variable: str | None = None
    """Environment variable that holds the API key; null: no key is sent."""
    concurrency: PositiveInt = 16
    """Maximum number of requests in flight at the same time."""
    timeout: PositiveFloat = 120.0
    """Seconds that one attempt may take, to its last byte."""
    attempts: PositiveInt = 4
    """Maximum attempts at a request that fails with a 429, a 5xx, a broken connection or a timeout.
    """
    backoff: NonNegativeFloat = 0.5
    """Seconds before the second attempt; doubled for each further one, times 0.5 to 1 at random.
    Added to the server's `Retry-After`, which counts up to `timeout`."""
    max_failures: PositiveInt = 8
    """Failed requests in a row, all attempts included, that open the circuit breaker."""
    rest: NonNegativeFloat = 30.0
    """Seconds without requests after the circuit breaker has opened."""
    cache: str | None = "memory"
    """Cache of answers: a folder, `memory`, or null to send every request."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"server url {self.url!r} must begin with http:// or https://")
        if not self.model:
            raise ValueError("server model is empty; set the name under which the server offers it")
        require_ranges(self, "server")


@dataclass(frozen=True)
class ChatAnswer:
    """Answer of a model."""

    text: str
    finish: str = "stop"
    """Finish reason of the API; `length` if the answer was cut off."""
    tokens: Sequence[tuple[str, Sequence[tuple[str, float]]]] = ()
    """Generated tokens, each with the likeliest tokens at its position and their log-probabilities.
    Several of these may have the same text."""


class ChatClient:
    """Sends requests to one server from a thread with a separate event loop; cheap to construct."""

    def __init__(self, server: Server):
        self.server = server
        self._cache = AnswerCache(server.cache)
        self._session: _Session | None = None

    def load(self) -> None:
        """Connect, and check that the server offers the model.

        Raises:
            ValueError: No server answers, the key is missing or rejected, or the model is unknown.
        """
        if self._session is not None:
            return
        headers = {}
        if name := self.server.key_variable:
            if not (key := os.environ.get(name)):
                raise ValueError(f"the API key is missing: set the environment variable {name}")
            headers = {"Authorization": f"Bearer {key}"}
        with ExitStack() as stack:
            # One loop for all batches, because semaphores and connections are bound to a loop.
            self._portal = stack.enter_context(start_blocking_portal(name="flowalign-chat"))
            session = _Session(self.server, headers)
            stack.callback(self._portal.call, session.http.aclose)
            self._portal.call(session.check)
            self._open = stack.pop_all()  # until the process ends
        self._session = session

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that awaits `ask`, and wait for it in a thread without an event loop.

        An interrupt cancels the coroutine.
        """
        self.load()
        future = self._portal.start_task_soon(lambda: work)
        try:
            return future.result()
        finally:
            future.cancel()

    async def ask(self, messages: Messages, parameters: Mapping[str, Any]) -> ChatAnswer:
        """Return the answer to a conversation, from the cache if it holds the same request.

        Raises:
            ChatError: There is no answer.
        """
        body, key = self._request(messages, parameters)
        if (kept := self._cache.get(key)) is not None:
            return ChatAnswer(**kept)
        assert self._session is not None
        answer = await self._session.ask(body)
        self._cache.put(key, asdict(answer))
        return answer

    def forget(self, messages: Messages, parameters: Mapping[str, Any]) -> None:
        """Remove an answer that could not be read from the cache."""
        self._cache.drop(self._request(messages, parameters)[1])

    def _request(self, messages: Messages, parameters: Mapping[str, Any]) -> tuple[bytes, str]:
        """Return the body of a request and its key in the cache."""
        content = {"model": self.server.model, "messages": messages, **parameters}
        body = json.dumps(content, sort_keys=True).encode()
        return body, hashlib.sha256(body).hexdigest()


class _Session:
    """Objects bound to one event loop: connections, request limit, circuit breaker."""

    def __init__(self, server: Server, headers: Mapping[str, str]):
        limits = httpx2.Limits(max_connections=server.concurrency)
        self.http = httpx2.AsyncClient(
            base_url=server.url.rstrip("/") + "/",
            headers=headers,
            timeout=None,
            limits=limits,
            verify=server.url.startswith("https://"),  # reading certificates takes 0.2 s
        )
        self.server = server
        self.gate = asyncio.Semaphore(server.concurrency)
        self.circuit_breaker = CircuitBreaker(server.max_failures, server.rest)
        self.random = random.Random(0)

    async def check(self) -> None:
        """Raise ValueError if the server cannot be used."""
        url, model = self.server.url, self.server.model
        try:
            async with asyncio.timeout(self.server.timeout):
                response = await self.http.get("models")
        except (httpx2.RequestError, TimeoutError) as error:
            raise ValueError(
                f"no chat server answers at {url} ({type(error).__name__}); start one, such as "
                f"`vllm serve {model}`, or correct the url"
            ) from error
        if response.status_code in (401, 403):
            raise ValueError(
                f"{url} rejects the API key (HTTP {response.status_code}); "
                f"key_variable is {self.server.key_variable}"
            )
        try:
            names = [entry["id"] for entry in parse_json(response.content)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{url}/models is not a list of models (HTTP {response.status_code}); "
                f"is the version missing from the url?"
            ) from error
        require_known(f"{url} does not offer model", [model], names)

    async def ask(self, body: bytes) -> ChatAnswer:
        """Return the answer to a request, retrying within the configured attempts."""
        async with self.gate:
            return await self.circuit_breaker.call(lambda: self._attempts(body))

    async def _attempts(self, body: bytes) -> ChatAnswer:
        attempts, reason, wait = self.server.attempts, "", 0.0
        for attempt in range(attempts):
            if attempt:
                delay = min(self.server.backoff * 2 ** (attempt - 1), _LONGEST_DELAY)
                await asyncio.sleep(wait + delay * self.random.uniform(0.5, 1))
            try:
                return await self._attempt(body)
            except ServerDown as error:
                reason, wait = str(error), min(error.retry_after, self.server.timeout)
        raise ServerDown(f"{reason}, after {attempts} attempts")

    async def _attempt(self, body: bytes) -> ChatAnswer:
        try:
            async with asyncio.timeout(self.server.timeout):
                response = await self.http.post(
                    "chat/completions", content=body, headers={"Content-Type": "application/json"}
                )
        except TimeoutError as error:
            raise ServerDown(f"no answer within {self.server.timeout:g} s") from error
        except httpx2.RequestError as error:
            raise ServerDown(f"{type(error).__name__} {error}".strip()) from error
        status = response.status_code
        if status == 429 or status >= 500:
            seconds = read_retry_after(response.headers.get("retry-after", ""))
            raise ServerDown(f"HTTP {status}", seconds or 0.0)
        if status != 200:
            raise ChatError(f"the server refused the request: HTTP {status} {response.text[:200]}")
        try:
            return _parse_completion(parse_json(response.content))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerDown(f"not a chat completion: {response.text[:80]!r}") from error


def _parse_completion(completion: Any) -> ChatAnswer:
    choice = completion["choices"][0]
    tokens = (choice.get("logprobs") or {}).get("content") or []
    text = choice["message"]["content"]
    if not isinstance(text, str | None):
        raise TypeError(f"content is {type(text).__name__}")
    return ChatAnswer(
        text or "",
        str(choice.get("finish_reason")),
        [(str(token["token"]), _parse_likeliest(token["top_logprobs"])) for token in tokens],
    )


def _parse_likeliest(tokens: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return text and log-probability of the tokens; a server may list the same token twice."""
    return list(dict.fromkeys((str(one["token"]), float(one["logprob"])) for one in tokens))
