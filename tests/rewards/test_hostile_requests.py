"""Every invalid request is rejected with a reason, costs little, and disables nothing."""

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import pytest
import torch

from flowalign.cli.options import Parser
from flowalign.cli.serve import add_arguments, run
from flowalign.rewards.batching import Limits, Refusal, Room
from flowalign.rewards.protocol import pack_batch
from flowalign.rewards.reward_client import NoAnswer, RewardClient
from flowalign.rewards.reward_server import listen
from flowalign.types import Loadable, MediaBatch, RewardModel, RewardOutput, RewardSpec
from flowalign.utils.hosts import is_foreign
from reward_models.wrappers.out_of_process import RemoteReward
from tests.fixtures.running import Running
from tests.fixtures.served import (
    JSON,
    MALFORMED,
    OVERSIZED,
    Hostile,
    Level,
    binary_request,
    json_request,
    memory_mb,
    oversized,
    png,
    post,
    serving,
    well_behaved,
)

CONTENT = "application/x-flowalign"
SMALL = {"max_image_mp": 1.0, "max_request_mp": 2.0, "max_request_mb": 8.0, "max_held_mb": 64.0}


@pytest.fixture(scope="module")
def there():
    with Running(Level(), **SMALL) as running:
        yield running


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_is_refused_with_a_reason_and_disables_nothing(there, name):
    status, answer = post(there.url, *MALFORMED[name])
    assert status == 400
    assert 0 < len(json.loads(answer)["error"]) < 1000
    assert there.service.health()["status"] == "ready"
    assert post(there.url, JSON, json_request())[0] == 200
    assert there.service.room.held == {}


@pytest.mark.parametrize("kind", ["", "text/plain", "multipart/form-data", "text/plain; charset=x"])
def test_content_types_that_a_page_elsewhere_can_send_are_refused(there, kind):
    status, answer = post(there.url, kind, json_request())
    assert (status, "application/json" in json.loads(answer)["error"]) == (415, True)


def connect(there) -> socket.socket:
    return socket.create_connection(("127.0.0.1", there.port), 60)


def answer_to(there, message: bytes) -> bytes:
    """The answer of a server to a message, until it closes the connection."""
    with connect(there) as connection:
        connection.sendall(message)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def status_with(there, **headers: str | None) -> int:
    """Status of a request with these headers, without those that are None."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items() if value is not None]
    head = f"GET /health HTTP/1.1\r\n{''.join(lines)}connection: close\r\n\r\n"
    return int(answer_to(there, head.encode()).split()[1])


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8411", 200),
        ("LocalHost", 200),
        ("[::1]:8411", 200),
        ("127.0.0.5", 200),
        ("evil.example:8411", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.1:8411", 403),
        ("", 403),
        (None, 403),
        ("[::1", 403),
    ],
)
def test_a_page_elsewhere_that_pretends_to_be_here_is_refused(there, host, status):
    """Its name was resolved to the loopback address: DNS rebinding."""
    assert status_with(there, host=host) == status


def test_a_server_for_other_machines_has_names_that_it_does_not_know():
    assert not is_foreign("gpu-box:8411", "0.0.0.0")
    assert not is_foreign("10.0.0.1", "10.0.0.1")
    assert is_foreign(None, "0.0.0.0")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", OVERSIZED)
def test_pictures_are_refused_by_their_declared_size_before_they_are_decoded(
    there, name, monkeypatch
):
    def decode(*_):
        raise AssertionError("it was decoded")

    monkeypatch.setattr("flowalign.rewards.protocol._decode_images", decode)
    monkeypatch.setattr("flowalign.rewards.protocol._decode_tensors", decode)
    status, answer = post(there.url, *oversized(name))
    assert (status, "pixels" in answer or "MP" in answer) == (413, True)


def test_the_largest_picture_that_is_allowed_is_scored(there):
    status, answer = post(there.url, JSON, json_request(1, png(1000, 1000)))
    assert (status, json.loads(answer)["values"]) == (200, [[0.0]])


def packed(*shape: int, prompts: tuple[str, ...] = ("a",), last: float = 0.5) -> bytes:
    """A request of grey media with another value of the last pixel."""
    media = torch.full(shape, 0.5)
    media[-1, -1, -1, -1, -1] = last
    return b"".join(pack_batch(MediaBatch(media, prompts), "float32", {}))


def pixels_request(value: float) -> bytes:
    return packed(2, 1, 3, 4, 6, prompts=("a", "b"), last=value)


@pytest.mark.parametrize("value", [1e30, -0.5, 1.1])
def test_pixels_outside_their_range_are_refused_with_the_range(there, value):
    status, answer = post(there.url, CONTENT, pixels_request(value))
    assert status == 400
    assert "expected float32 in [0, 1]" in json.loads(answer)["error"]


@pytest.mark.parametrize("value", [1.0005, -0.0005, float("nan")])
def test_rounded_pixels_are_scored_and_others_that_are_not_finite_fail_alone(there, value):
    status, answer = post(there.url, CONTENT, pixels_request(value))
    assert status == 200
    first, second = json.loads(answer)["values"]
    assert first == [0.5]
    assert (second == [None]) == (value != value)


class Careless(RewardModel):
    """An image reward that screens nothing and fails, naming a file of its author."""

    spec = RewardSpec("careless", ("careless",), "image", (0.0, 1.0), "none")

    def score(self, batch: MediaBatch) -> RewardOutput:
        if "fail" in batch.prompts:
            raise OSError("/home/author/weights/head.safetensors is cut short")
        return RewardOutput.build(self.spec, batch.media.mean((1, 2, 3, 4))[:, None])


def test_an_image_reward_is_not_asked_about_clips():
    with Running(Careless()) as running:
        status, answer = post(running.url, CONTENT, packed(1, 40, 3, 4, 6))
        assert status == 422
        assert "scores images, got videos of 40 frames" in json.loads(answer)["error"]
        assert post(running.url, CONTENT, packed(1, 1, 3, 4, 6))[0] == 200


class Lost(Careless, Loadable):
    def load(self) -> None:
        raise OSError("/home/author/weights/head.safetensors is missing")


def test_no_answer_names_a_folder_of_the_server(capsys):
    failing = packed(1, 1, 3, 4, 6, prompts=("fail",))
    with Running(Careless()) as running:
        status, answer = post(running.url, CONTENT, failing)
        assert status == 500
        assert "head.safetensors is cut short" in answer
        assert "/home" not in answer
        assert __file__ not in answer
    assert "/home/author/weights/head.safetensors" in capsys.readouterr().err  # its own log
    with Running(Lost()) as running:
        while running.service.health()["status"] == "loading":
            time.sleep(0.01)
        status, answer = post(running.url, CONTENT, failing)
        assert status == 500
        assert "head.safetensors is missing" in answer
        assert "/home" not in answer
        assert "/home" not in json.dumps(running.service.health())


def test_an_unknown_model_is_not_found(there):
    status, answer = post(there.url, CONTENT, binary_request(model="other"))
    assert (status, "there are level" in answer) == (404, True)


def test_a_request_that_the_model_trips_over_leaves_others_of_its_batch_alone(there):
    poisoned = [i % 4 == 0 for i in range(16)]
    bodies = [binary_request(metadata=[{"poison": 1} if bad else {}, {}]) for bad in poisoned]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda body: post(there.url, CONTENT, body), bodies))
    assert [status for status, _ in answers] == [500 if bad else 200 for bad in poisoned]
    assert "raised KeyError: 'poison'" in answers[0][1]


HEAD = b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "sent"),
    [(b"", b""), (b"", b"POST /sc"), (b"", b"POST /score HTTP/1.1\r\n"), (HEALTH, b"POST /sc")],
)
def test_a_connection_whose_request_never_comes_is_closed(before, sent):
    with Running(Level(), read_timeout=0.1) as there, connect(there) as connection:
        if before:
            connection.sendall(before)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(sent)
        assert connection.recv(65536) == b""


def test_a_request_that_stops_half_way_is_refused_and_let_go():
    with Running(Level(), read_timeout=0.1) as there:
        answer = answer_to(there, HEAD + b"content-length: 99\r\n\r\nabc")
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"not received within 0.1 seconds" in answer
        assert there.service.room.held == {}


def test_bodies_are_received_up_to_a_number_and_a_size():
    limits = Limits(max_requests=2, max_request_mb=1.0, max_request_mp=0.1, max_held_mb=4.0)
    room = Room(limits)
    with room.admit() as hold_first, room.admit() as hold_second:
        hold_first(3 * 2**20)
        with pytest.raises(Refusal, match="fill 4 MB") as full:
            hold_second(2**20 + 1)
        with pytest.raises(Refusal, match="2 requests are waiting"), room.admit():
            pass
        assert full.value.status == 503
    assert room.held == {}


def test_a_client_waits_for_room_as_the_server_says_and_loses_nothing(monkeypatch):
    monkeypatch.setattr("flowalign.rewards.reward_server.RETRY_AFTER_S", 0)
    gate = threading.Event()

    class Slow(Level):
        def score(self, batch):
            assert gate.wait(60)
            return super().score(batch)

    with Running(Slow(), max_requests=1) as there, ThreadPoolExecutor(3) as threads:
        once = [iter((True, False)).__next__ for _ in range(3)]
        asked = [threads.submit(well_behaved, there.url, i, go) for i, go in enumerate(once)]
        busy, room = [], there.service.room
        while not busy:
            if room.held:
                with connect(there) as connection:
                    connection.sendall(HEAD + b"content-length: 0\r\n\r\n")
                    busy = [connection.recv(65536)]
            time.sleep(0.01)
        gate.set()
        assert [future.result(60)[1] for future in asked] == [[], [], []]
    assert busy[0].startswith(b"HTTP/1.1 503")
    assert b"retry-after: 0" in busy[0]


def test_a_busy_server_is_no_failure_of_a_client_without_retries(monkeypatch):
    monkeypatch.setattr("flowalign.rewards.reward_server.RETRY_AFTER_S", 0)
    with Running(Level(), max_requests=1) as there:
        reward = RemoteReward(there.url, ["level"], retries=0, timeout=60.0)
        reward.load()
        there.service.room.held["other"] = 0
        threading.Timer(0.1, there.service.room.held.clear).start()
        assert reward.score(MediaBatch(torch.rand(1, 1, 3, 2, 2), ["a"])).valid.all()


def test_a_port_in_use_is_said_in_one_line():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        message = f"cannot serve on host '127.0.0.1', port {port}: "
        with pytest.raises(ValueError, match=message) as said:
            run(arguments("--port", str(port)))
    assert len(str(said.value).splitlines()) == 1


def test_a_host_that_is_not_here_is_refused(monkeypatch):
    monkeypatch.setenv("FLOWALIGN_REWARD_TOKEN", "secret")
    with pytest.raises(ValueError, match="cannot serve on host 'no such host'"):
        run(arguments("--host", "no such host", "--port", "0"))


@pytest.mark.parametrize("option", [f.name for f in fields(Limits) if f.name != "max_wait_ms"])
def test_a_limit_that_lets_nothing_through_is_named(capsys, option):
    with pytest.raises(SystemExit, match="2"):
        arguments(f"--{option}=0")
    assert f"--{option} is 0; it must be " in capsys.readouterr().err


def test_room_for_less_than_the_largest_request_is_refused():
    with pytest.raises(ValueError, match="max_held_mb is 100; the largest request needs 1400"):
        run(arguments("--max_held_mb", "100"))


def arguments(*words):
    parser = Parser()
    add_arguments(parser)
    return parser.parse_args(["reward_models.JpegSize", *words])


@pytest.mark.slow
def test_sixty_four_clients_lose_nothing_among_hostile_ones(tmp_path):
    """Memory may grow by the held requests, and by the same amount for copies and the allocator."""
    limits = [f"--{name}={value:g}" for name, value in SMALL.items()]
    stopped, held = threading.Event(), SMALL["max_held_mb"]
    with (
        serving(tmp_path / "rewards.yaml", *limits, "--read_timeout=2") as (url, pid),
        ThreadPoolExecutor(72) as threads,
    ):
        started_with, until = memory_mb(pid), time.monotonic() + 3
        hostile = [Hostile(url, seed, stopped) for seed in range(8)]
        attacks = [threads.submit(one.run) for one in hostile]
        going_on = lambda: time.monotonic() < until  # noqa: E731
        clients = [threads.submit(well_behaved, url, i, going_on, 0.2) for i in range(64)]
        results = [client.result(120) for client in clients]
        stopped.set()
        for attack in attacks:
            attack.result(120)
        RemoteReward(url, ["level"]).load()  # it is ready, or this raises
        grown = memory_mb(pid, "VmHWM") - started_with
    assert [wrong for _, wrong in results if wrong] == []
    assert all(seconds for seconds, _ in results)
    assert [wrong for one in hostile for wrong in one.wrong] == []
    assert sum((one.sent for one in hostile), Counter()).keys() >= {"half", "poisoned", "mutated"}
    assert grown < 3 * held + 100


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8413", 200),
        ("http://localhost", 200),
        ("http://evil.example", 403),
        ("https://127.0.0.1.evil.example:8411", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_a_page_of_another_site_is_refused_by_its_origin(there, origin, status):
    assert status_with(there, host="127.0.0.1", origin=origin) == status


LENGTHS = {
    "both": b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "two": b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
    "digits": b"content-length: " + b"9" * 400 + b"\r\n\r\n{}",
    "negative": b"content-length: -2\r\n\r\n{}",
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_contradicting_lengths_are_refused(there, kind):
    answer = answer_to(there, HEAD + LENGTHS[kind])
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


def test_idle_connections_do_not_take_the_place_of_requests():
    """Idle connections are closed before they fill the table of open files."""
    with Running(Level()) as there:
        idle = [connect(there) for _ in range(300)]
        assert post(there.url, JSON, json_request())[0] == 200
        assert len(there.server.server_state.connections) <= 129
        for connection in idle:
            connection.close()


class Answering:
    """A server that sends the same bytes to every request, one by one if it is slow."""

    def __init__(self, body: bytes, seconds: float = 0.0):
        self.body, self.seconds = body, seconds
        self.socket = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def __enter__(self):
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.socket.close()

    def _serve(self):
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self.socket.accept()
                connection.recv(1 << 20)
                head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
                head %= len(self.body)
                connection.sendall(head)
                for i in range(len(self.body)) if self.seconds else ():
                    time.sleep(self.seconds)
                    connection.sendall(self.body[i : i + 1])
                connection.sendall(b"" if self.seconds else self.body)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(1.0)
                with contextlib.suppress(OSError):  # unread bytes would reset the connection
                    while connection.recv(1 << 20):
                        pass
                connection.close()


READY = b'{"status": "ready", "models": {}, "reasons": {}}'
ODD = [b"[]", b"1", b'{"models": 1}', b"[" * 100_000, b'{"models": {}, "status": ' + b"9" * 5000]


@pytest.mark.parametrize("body", [*ODD, READY], ids=lambda body: body[:12].decode())
def test_a_server_of_another_kind_is_refused_by_its_address(body):
    with Answering(body) as other, pytest.raises(ValueError, match="is not that of a reward s"):
        RemoteReward(other.url, ["level"], timeout=5.0).load()


def test_an_answer_that_never_ends_is_given_up():
    with Answering(b"x" * 1000, seconds=0.2) as slow:
        client = RewardClient(slow.url, None, 0.1, None)
        start = time.monotonic()
        answer = client.score([b"{}"], Level().spec, 1)
        assert isinstance(answer, NoAnswer)
        assert "no complete answer within 0.1 s" in answer.why
        assert time.monotonic() - start < 10
