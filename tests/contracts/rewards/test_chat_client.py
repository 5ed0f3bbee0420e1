"""The client of chat servers, against a real one on loopback that misbehaves in every known way."""

import asyncio
import json
import threading
import time
from email.utils import formatdate
from itertools import pairwise

import pytest

from flowalign.rewards.reward_client import read_retry_after
from reward_models.chat import guards
from reward_models.chat.chat_client import ChatClient, Server
from reward_models.chat.guards import AnswerCache, ChatError, CircuitBreaker, ServerDown
from tests.fixtures.chat_server import MODEL, Reply

pytestmark = pytest.mark.slow

QUICK = {"backoff": 0.01, "timeout": 20.0, "cache": None}


def client_of(chat, **settings):
    return ChatClient(Server(chat.url, MODEL, **{**QUICK, **settings}))


async def _outcome(client, text, parameters):
    try:
        return (await client.ask([{"role": "user", "content": text}], parameters)).text
    except ChatError as error:
        return error


def ask(client, *texts, **parameters):
    """Answers, or the errors in their place, of requests made at the same time."""

    async def together():
        return await asyncio.gather(*(_outcome(client, text, parameters) for text in texts))

    return client.run(together())


class Clock:
    """Stands still until a test moves it."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr("reward_models.chat.guards.time", Clock())
    return guards.time


def loops():
    return [thread for thread in threading.enumerate() if thread.name == "flowalign-chat"]


def said(request):
    return request.body["messages"][0]["content"]


@pytest.fixture
def serve(start_server):
    """Return servers themselves, not the settings of their clients."""
    return start_server


def test_an_answer_comes_with_its_tokens_and_the_request_with_its_parameters(serve):
    tokens = [("Ye", {"Ye": -0.25, "No": -2.0}), ("s", {"s": 0.0})]
    chat = serve(lambda r: Reply("Yes", tokens, finish="length"))
    client = client_of(chat)

    async def work():
        return await client.ask([{"role": "user", "content": "so?"}], {"seed": 5, "max_tokens": 2})

    answer = client.run(work())
    assert (answer.text, answer.finish) == ("Yes", "length")
    assert [(t, dict(p)) for t, p in answer.tokens] == tokens
    body = chat.requests[0].body
    assert (body["model"], body["seed"], body["max_tokens"]) == (MODEL, 5, 2)


def test_requests_are_in_flight_together_and_never_more_than_allowed(serve):
    five = threading.Barrier(5)  # nobody is answered before five are there

    def answer(request):
        five.wait(20)
        return said(request)

    chat = serve(answer)
    texts = [f"question {i}" for i in range(20)]
    assert ask(client_of(chat, concurrency=5, timeout=30.0), *texts) == texts
    assert chat.most_at_once == 5


def test_a_client_serves_several_threads_and_code_that_runs_a_loop_of_its_own(serve):
    """A semaphore that met two loops would raise `bound to a different event loop`."""
    chat = serve(lambda r: Reply(said(r), delay=0.02))
    client = client_of(chat, concurrency=2)
    client.load()
    found = {}
    threads = [
        threading.Thread(target=lambda k=k: found.update({k: ask(client, f"{k}a", f"{k}b")}))
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {k: [f"{k}a", f"{k}b"] for k in range(4)}

    async def outside():
        return ask(client, "inside")

    assert asyncio.run(outside()) == ["inside"]


BAD = {
    "500": Reply(status=500),
    "429": Reply(status=429),
    "hang up": Reply(hang_up=True),
    "not JSON": Reply(raw=b"<html>bad gateway</html>"),
    "half an answer": Reply(raw=b'{"choices": [{"mess'),
    "no choices": Reply(raw=b'{"choices": []}'),
    "a list": Reply(raw=b"[1, 2]"),
    "content of a wrong type": Reply(raw=b'{"choices": [{"message": {"content": 7}}]}'),
    "bytes that are no text": Reply(raw=b"\xff\xfe\x00"),
    "a stall": Reply("late", delay=4.0),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_passing_fault_is_asked_again(serve, bad):
    chat = serve(lambda r: bad if r.number == 0 else "fine")
    client = client_of(chat, attempts=2, timeout=1.0 if bad.delay else 20.0)
    assert ask(client, "x") == ["fine"]
    assert len(chat.requests) == 2


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_lasting_fault_is_an_error_after_all_attempts_and_other_requests_go_on(serve, bad):
    chat = serve(lambda r: bad if said(r) == "bad" else said(r))
    client = client_of(chat, attempts=3, timeout=0.5 if bad.delay else 20.0)
    first, middle, last = ask(client, "a", "bad", "b")
    assert (first, last) == ("a", "b")
    assert isinstance(middle, ServerDown)
    assert "3 attempts" in str(middle)
    assert [said(r) for r in chat.requests].count("bad") == 3


def test_a_stall_ends_at_the_deadline(serve):
    chat = serve(lambda r: Reply("late", delay=60.0))
    client = client_of(chat, attempts=2, timeout=0.2)
    client.load()
    start = time.monotonic()
    (error,) = ask(client, "x")
    assert time.monotonic() - start < 30
    assert "no answer within 0.2 s" in str(error)


def test_a_refused_request_is_not_repeated_and_says_why(serve):
    chat = serve(lambda r: Reply(status=400, raw=b"prompt is too long"))
    (error,) = ask(client_of(chat), "x")
    assert "400 prompt is too long" in str(error)
    assert len(chat.requests) == 1


def test_waiting_doubles_with_every_attempt(serve):
    times = []

    def answer(request):
        times.append(time.monotonic())
        return Reply(status=503)

    ask(client_of(serve(answer), attempts=4, backoff=0.1), "x")
    waited = [b - a for a, b in pairwise(times)]
    assert len(waited) == 3
    for wait, longest in zip(waited, (0.1, 0.2, 0.4), strict=True):
        assert wait >= longest / 2
    assert sum(waited) < 10


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_rate_limit_is_waited_for_as_the_server_asks(serve, form):
    start, wait = time.time(), 1 if form == "seconds" else 2  # a date has whole seconds

    def answer(request):
        if time.time() < start + 1:
            asked = str(wait) if form == "seconds" else formatdate(start + wait, usegmt=True)
            return Reply(status=429, headers={"Retry-After": asked})
        return "fine"

    chat = serve(answer)
    client = client_of(chat, attempts=2)
    client.load()
    assert ask(client, *"abc") == ["fine"] * 3
    assert len(chat.requests) <= 6


def test_a_rate_limit_is_waited_for_up_to_the_timeout(serve):
    chat = serve(lambda r: Reply(status=429, headers={"Retry-After": "9999"}))
    client = client_of(chat, attempts=3, timeout=0.3)
    client.load()
    start = time.monotonic()
    (error,) = ask(client, "a")
    assert 0.6 <= time.monotonic() - start < 30
    assert str(error) == "HTTP 429, after 3 attempts"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("", None),
        ("soon", None),
        ("-3", None),
        ("1.5", None),
        ("0", 0.0),
        ("120", 120.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Wed, 41 Oct 2015 07:28:00 GMT", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(header, seconds):
    assert read_retry_after(header) == seconds
    later = formatdate(time.time() + 60, usegmt=True)
    assert read_retry_after(later) == pytest.approx(60, abs=5)


def test_a_server_that_dies_in_the_middle_fails_what_it_did_not_answer_and_nothing_else(serve):
    release = threading.Event()

    def answer(request):
        if said(request) == "last words":
            return "spoken"
        release.wait(20)
        return "never heard"

    def kill():
        while len(chat.requests) < 4:
            time.sleep(0.01)
        time.sleep(0.3)
        chat.die()

    chat = serve(answer)
    client = client_of(chat, attempts=2)
    client.load()
    threading.Thread(target=kill, daemon=True).start()
    spoken, *lost = ask(client, "last words", "a", "b", "c")
    release.set()
    assert spoken == "spoken"
    assert all(isinstance(error, ServerDown) for error in lost)


def test_the_breaker_opens_fails_at_once_and_recovers(serve, clock):
    sick = threading.Event()
    sick.set()
    chat = serve(lambda r: Reply(status=500) if sick.is_set() else said(r))
    client = client_of(chat, attempts=2, max_failures=3, rest=30.0, concurrency=1)
    errors = ask(client, *"abcdefgh")
    assert all(isinstance(error, ServerDown) for error in errors)
    assert len(chat.requests) == 6  # three requests with two attempts each, then none
    assert "3 times in a row" in str(errors[-1])
    clock.now += 29
    sick.clear()
    assert isinstance(ask(client, "again")[0], ServerDown)
    assert len(chat.requests) == 6
    clock.now += 1
    assert ask(client, *"abc") == ["a", "b", "c"]
    assert len(chat.requests) == 9


def test_half_open_one_request_tries_and_the_others_wait_for_its_outcome(serve, clock):
    chat = serve(lambda r: Reply(status=500, delay=0.05))
    client = client_of(chat, attempts=1, max_failures=2, rest=30.0, concurrency=8)
    ask(client, "a", "b")
    clock.now += 30
    before = len(chat.requests)
    assert all(isinstance(error, ServerDown) for error in ask(client, *"cdefgh"))
    assert len(chat.requests) == before + 1
    chat.answer = said
    clock.now += 30
    assert ask(client, *"cdefgh") == list("cdefgh")


def test_refused_requests_do_not_open_the_breaker():
    async def refuse():
        raise ChatError("HTTP 400")

    async def down():
        raise ServerDown("HTTP 500")

    async def work():
        guard = CircuitBreaker(max_failures=2, rest=60.0)
        for ask_it in (down, refuse, down, refuse, down):
            with pytest.raises(ChatError, match="HTTP"):
                await guard.call(ask_it)
        with pytest.raises(ChatError, match="500"):
            await guard.call(down)
        with pytest.raises(ChatError, match="not sent"):
            await guard.call(refuse)

    asyncio.run(work())


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_what_was_asked_before_makes_no_request(serve, tmp_path, where):
    chat = serve(lambda r: f"{said(r)} {r.body['seed']}")
    cache = "memory" if where == "memory" else str(tmp_path)
    client = client_of(chat, cache=cache)
    assert ask(client, "a", "b", seed=1) == ["a 1", "b 1"]
    assert ask(client, "b", "a", seed=1) == ["b 1", "a 1"]
    assert len(chat.requests) == 2
    assert ask(client, "a", seed=2) == ["a 2"]  # other parameters are another question
    assert len(chat.requests) == 3
    other = ChatClient(Server(chat.url, "other", cache=cache))
    chat.models = (MODEL, "other")
    ask(other, "a", seed=1)
    assert len(chat.requests) == 4  # another model is another question
    if where == "folder":
        assert ask(client_of(chat, cache=cache), "a", seed=1) == ["a 1"]
        assert len(chat.requests) == 4  # a new client, as after a restart
        assert not list(tmp_path.rglob("*.partial"))


def test_errors_are_not_kept(serve):
    chat = serve(lambda r: Reply(status=500) if r.number == 0 else "fine")
    client = client_of(chat, attempts=1, cache="memory")
    assert isinstance(ask(client, "a")[0], ServerDown)
    assert ask(client, "a") == ["fine"]


def test_a_cached_answer_that_is_not_whole_is_asked_for_again(serve, tmp_path):
    chat = serve(lambda r: "fine")
    client = client_of(chat, cache=str(tmp_path))
    ask(client, "a")
    (kept,) = tmp_path.rglob("*.json")
    kept.write_text(kept.read_text()[:9])
    assert ask(client, "a") == ["fine"]
    assert len(chat.requests) == 2
    assert json.loads(kept.read_text())["text"] == "fine"


def test_memory_holds_the_newest_answers(monkeypatch):
    monkeypatch.setattr("reward_models.chat.guards._MOST_IN_MEMORY", 2)
    cache = AnswerCache("memory")
    for key in "abc":
        cache.put(key, {"text": key})
    assert [cache.get(key) for key in "abc"] == [None, {"text": "b"}, {"text": "c"}]


def test_load_names_what_is_wrong_with_the_server(serve, monkeypatch):
    chat = serve(lambda r: "", key="secret", models=("llama", "qwen"))
    monkeypatch.setenv("JUDGE_KEY", "wrong")
    with pytest.raises(ValueError, match="rejects the API key"):
        client_of(chat, key_variable="JUDGE_KEY").load()
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with pytest.raises(ValueError, match=r"does not offer model 'judge'; there are .*qwen"):
        client_of(chat, key_variable="JUDGE_KEY").load()
    ChatClient(Server(chat.url, "qwen", key_variable="JUDGE_KEY")).load()
    with pytest.raises(ValueError, match="NO_SUCH_KEY"):
        client_of(chat, key_variable="NO_SUCH_KEY").load()
    with pytest.raises(ValueError, match="version missing"):
        ChatClient(Server(f"http://127.0.0.1:{chat.port}", MODEL, key_variable="JUDGE_KEY")).load()
    chat.die()
    with pytest.raises(ValueError, match=f"no chat server answers at {chat.url}") as caught:
        client_of(chat).load()
    assert len(str(caught.value).splitlines()) <= 5


def test_a_failed_load_leaves_no_thread(serve):
    chat = serve(lambda r: "")
    chat.die()
    before = loops()
    with pytest.raises(ValueError, match="no chat server"):
        client_of(chat).load()
    assert loops() == before
