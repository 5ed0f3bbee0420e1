"""Votes over HTTP, a page that a browser operates, and votes as the reward of a training run."""

import errno
import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
from PIL import Image

from flowalign.cli import vote
from flowalign.cli.main import parse, run_verb
from flowalign.curation.votes import vote_server as serving
from flowalign.curation.votes.poll import Poll, PollSettings
from flowalign.curation.votes.questions import Question, VoteTable
from flowalign.curation.votes.vote_reward import VoteReward
from flowalign.rewards.batching import Limits
from flowalign.rewards.reward_server import Service
from flowalign.types import MediaBatch
from flowalign.utils.media.media import Media
from flowalign.utils.tracking import read_metrics
from reward_models.wrappers.out_of_process import RemoteReward
from tests.fixtures.browser import needs_browser, read_in_browser
from tests.fixtures.running import RunningApp
from tests.fixtures.small_run import go, new_run
from tests.fixtures.zygote import python


class Served(RunningApp):
    """A vote server in a thread, with `count` questions about three images each."""

    def __init__(self, folder, count=2, token=None, **settings):
        questions = []
        for number in range(count):
            files = [folder / f"{number}-{i}.png" for i in range(3)]
            for i, file in enumerate(files):
                Image.new("RGB", (300, 200), (80 * i, 60, 50 * number)).save(file)
            media = [Media(str(file)) for file in files]
            questions.append(Question(f"q{number}", f"prompt <{number}>", media, media[:1]))
        self.poll = Poll(PollSettings(**settings), VoteTable(folder / "votes.jsonl"), questions)
        self.reward = VoteReward(self.poll, folder / "samples", 4)
        service = Service([self.reward], Limits(), token)
        app = serving.vote_application(self.poll, service, "127.0.0.1", folder)
        super().__init__(app, headers=serving.HEADERS)

    def ask(self, path, content=None, **headers):
        return ask(self.port, path, content, **headers)

    def vote(self, question, values, annotator="anna", dim="overall"):
        content = {"annotator": annotator, "question": question, "seconds": 1.5}
        return self.ask("/vote", content | {"answers": {dim: values}})


def ask(port, path, content=None, **headers):
    """Status and content of a GET request, or of a POST request with JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"} | headers
    body = content if content is None or isinstance(content, bytes) else json.dumps(content)
    connection.request("GET" if content is None else "POST", path, body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_a_voter_over_http_answers_all_questions(tmp_path):
    with Served(tmp_path) as served:
        assert b"flowalign vote" in served.ask("/")[1]
        for left in (2, 1):
            state = json.loads(served.ask("/next?annotator=anna")[1])
            question = state["question"]
            assert (state["done"], state["left"]) == (2 - left, left)
            assert sorted(one["index"] for one in question["candidates"]) == [0, 1, 2]
            for one in (*question["candidates"], *question["sources"]):
                assert served.ask(one["address"])[1][1:4] == b"PNG"
            status, saved = served.vote(question["id"], [2, 1, 2])
            assert (status, json.loads(saved)) == (200, {"saved": True})
        state = json.loads(served.ask("/next?annotator=anna")[1])
        assert (state["question"], state["done"], state["left"]) == (None, 2, 0)
        served.ask("/undo", {"annotator": "anna"})
        assert json.loads(served.ask("/next?annotator=anna")[1])["done"] == 1
    rows = [json.loads(line) for line in (tmp_path / "votes.jsonl").read_text().splitlines()]
    assert [(row["question"], row["ranks"], row["seconds"]) for row in rows] == [
        ("q0", {"overall": [2, 1, 2]}, 1.5)
    ]
    assert rows[0]["images"] == ["0-0.png", "0-1.png", "0-2.png"]


@pytest.mark.parametrize(
    ("path", "content", "headers", "status"),
    [
        ("/vote", b"{", {}, 400),
        ("/vote", [1], {}, 400),
        ("/vote", {"annotator": "a", "question": "q0", "seconds": 1}, {}, 400),
        ("/vote", {"annotator": "a", "question": "q0", "seconds": float("nan")}, {}, 400),
        ("/vote", {"annotator": "a", "question": "no", "answers": {}, "seconds": 1}, {}, 400),
        ("/vote", {}, {"Content-Type": "text/plain"}, 415),
        ("/vote", b"x" * 200_000, {}, 413),
        ("/vote", {}, {"Host": "evil.example"}, 403),
        ("/score", b"{}", {"Content-Type": "text/plain"}, 415),
        ("/score", b"{}", {}, 400),
        ("/next/more", None, {}, 404),
        ("/media/q0/9", None, {}, 404),
        ("/media/q0/../../votes.jsonl", None, {}, 404),
        ("/media", None, {}, 404),
        ("/votes.jsonl", None, {}, 404),
        ("/next", None, {"Host": "evil.example"}, 403),
        ("/next", None, {"Host": ""}, 403),
        ("/score", b"{}", {"Host": "evil.example"}, 403),
    ],
)
def test_other_requests_are_refused(tmp_path, path, content, headers, status):
    with Served(tmp_path) as served:
        assert served.ask(path, content, **headers)[0] == status
        assert not served.poll.table.rows


def test_pages_may_load_from_their_server_alone(tmp_path):
    with Served(tmp_path) as served:
        headers = httpx2.get(served.url).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


def test_only_samples_are_sent_and_no_link_that_leads_out(tmp_path):
    folder, outside = tmp_path / "samples", tmp_path / "private.png"
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(outside)
    with Served(folder) as served:
        files = [Path(one.path) for one in served.poll.questions["q0"].candidates]
        for file, target in zip(files, ("/etc/passwd", outside, folder / "1-0.png"), strict=True):
            file.unlink()
            file.symlink_to(target)
        assert [served.ask(f"/media/q0/{i}")[0] for i in range(3)] == [404, 404, 200]
        for file in files:
            file.unlink()
        files[0].write_bytes(b"root:x:0:0")
        os.mkfifo(files[1])
        Image.new("RGB", (8, 8)).save(files[2], "JPEG")
        assert [served.ask(f"/media/q0/{i}")[0] for i in range(3)] == [404, 404, 200]
        served.poll.add(Question("q9", "named in a table", [Media(str(outside))] * 2))
        assert served.ask("/media/q9/0") == (200, outside.read_bytes())


def test_a_pipe_that_is_named_as_a_video_stops_no_question(tmp_path):
    os.mkfifo(tmp_path / "a.mp4")
    with Served(tmp_path, 0) as served:
        served.poll.add(Question("q0", "a", [Media(str(tmp_path / "a.mp4"))] * 2))
        question = json.loads(served.ask("/next?annotator=anna")[1])["question"]
        assert [one["video"] for one in question["candidates"]] == [False, False]
        assert served.ask("/media/q0/0")[0] == 404


def test_a_full_disk_is_answered_and_the_next_vote_is_whole(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Served(tmp_path) as served:
        assert served.vote("q0", [1, 2, 3])[0] == 200
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", fail)
            status, why = served.vote("q1", [1, 2, 3])
        assert (status, b"No space left" in why) == (507, True)
        assert [*VoteTable(tmp_path / "votes.jsonl").rows] == ["q0/anna"]
        assert served.vote("q1", [3, 2, 1])[0] == 200
    rows = VoteTable(tmp_path / "votes.jsonl").rows
    assert [row["ranks"]["overall"] for row in rows.values()] == [[1, 2, 3], [3, 2, 1]]


def test_a_public_server_needs_its_token(tmp_path, monkeypatch):
    with Served(tmp_path, token="secret") as served:
        assert served.ask("/")[0] == served.ask("/?key=wrong")[0] == 401
        assert served.ask("/next?annotator=a&key=secret")[0] == 200
        assert served.ask("/spec", Authorization="Bearer secret")[0] == 200
    monkeypatch.delenv("FLOWALIGN_REWARD_TOKEN", raising=False)
    with pytest.raises(ValueError, match="clients need a token"):
        run_verb_of(["vote", str(tmp_path), "--host", "0.0.0.0"])


def run_verb_of(words):
    """Run the command, so that its errors are raised."""
    return vote.run(parse(words))


def test_a_run_gets_the_votes_on_its_samples(tmp_path):
    with Served(tmp_path, 0, annotators=2) as served:
        reward = RemoteReward(served.url, ["overall"], "votes", timeout=60.0)
        media = torch.rand(5, 1, 3, 8, 8)
        media[4] = media[3]  # equal samples are one candidate
        batch = MediaBatch(media, ["a", "a", "a", "b", "b"], groups=[0, 0, 0, 1, 1])
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(reward.score(batch)))
        waiting.start()
        for name in ("anna", "ben"):
            while (state := json.loads(served.ask(f"/next?annotator={name}")[1])) and (
                state["question"] is None
            ):
                time.sleep(0.02)
            assert state["question"]["prompt"] == "a"
            served.vote(state["question"]["id"], [1, 2, 3], name)
        waiting.join()
        (output,) = answers
        files = sorted((tmp_path / "samples").iterdir())
        ranked = served.poll.questions[state["question"]["id"]].candidates
        assert [medium.path for medium in ranked] == [
            str(file) for file in files if any(str(file) == m.path for m in ranked)
        ]
        assert sorted(output.values[:3, 0].tolist()) == [0, 0.5, 1]
        assert output.valid[:, 0].tolist() == [True] * 3 + [False] * 2
        assert "no different sample" in output.reasons[3]
        again = reward.score(batch.take([0, 1, 2]))  # as after a resume: no question is open
        assert again.values[:, 0].tolist() == output.values[:3, 0].tolist()


@pytest.mark.slow
def test_a_run_trains_on_votes_alone(tmp_path):
    """A voter ranks by redness whatever the run asks; the run waits for each answer."""

    def vote_until(ended: threading.Event) -> None:
        while not ended.is_set():
            state = json.loads(served.ask("/next?annotator=anna")[1])
            if state["question"] is None:
                time.sleep(0.01)
                continue
            question = served.poll.questions[state["question"]["id"]]
            red = [np.asarray(Image.open(m.path))[..., 0].mean() for m in question.candidates]
            order = sorted(range(len(red)), key=lambda i: -red[i])
            served.vote(question.id, [order.index(i) + 1 for i in range(len(red))])

    with Served(tmp_path, 0, kind="rank") as served:
        reward = RemoteReward(served.url, ["overall"], "votes", timeout=60.0, retries=0)
        run = new_run(tmp_path / "run", models=[reward], weights={"overall": 1.0}, num_steps=2)
        ended = threading.Event()
        voter = threading.Thread(target=vote_until, args=(ended,))
        voter.start()
        try:
            assert go(run)["status"] == "finished"
        finally:
            ended.set()
            voter.join()
        rows = [row for row in read_metrics(tmp_path / "run") if "reward_mean" in row]
        assert len(rows) == 2
        assert all(row["reward_invalid"] == 0 for row in rows)
        assert len(served.poll.table.rows) == 2 * 3  # a question per step and prompt


def test_a_run_that_waits_too_long_gets_no_score(tmp_path):
    with Served(tmp_path, 0) as served:
        reward = RemoteReward(served.url, ["overall"], "votes", timeout=0.05, retries=0)
        output = reward.score(MediaBatch(torch.rand(2, 1, 3, 8, 8), ["a", "a"], groups=[0, 0]))
    assert "not enough votes" in output.reasons[0]


def test_ratings_are_averaged_over_annotators(tmp_path):
    with Served(tmp_path, 0, kind="rate", dimensions=("x", "y"), annotators=2) as served:
        poll, media = served.poll, torch.rand(2, 1, 3, 8, 8)
        batch = MediaBatch(media, ["a", "a"])
        waiting = served.reward.submit(batch, 0.0)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        (question,) = poll.questions
        poll.vote("anna", question, {"x": [1, 2], "y": [5, 5]}, 0.0)
        poll.vote("ben", question, {"x": [2, 4], "y": [5, 4]}, 0.0)
        values = waiting.result(10).values
        assert sorted(values.tolist()) == [[1.5, 5.0], [3.0, 4.5]]


def test_samples_and_settings_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist; --online"):
        run_verb_of(["vote", str(tmp_path / "none")])
    Image.new("RGB", (4, 4)).save(tmp_path / "0.png")
    with pytest.raises(ValueError, match="gives no question: 1 no other sample"):
        run_verb_of(["vote", str(tmp_path)])
    with pytest.raises(ValueError, match="takes one dimension"):
        run_verb_of(["vote", str(tmp_path), "--dimensions", "a", "b"])
    out = tmp_path / "out"
    out.mkdir()
    row = {"id": "q/a", "question": "q", "user_id": "a", "ratings": {}, "repeat": False}
    row |= {"prompt": "p", "images": []}
    (out / "votes.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="other votes than ranks"):
        run_verb_of(["vote", str(tmp_path), "--out", str(out)])


KEYS = {
    "best": (["2"], ["0"], ["u"], ["3"]),
    "rank": (["3", "1"], ["2", "Enter"]),
    "rate": (["5", "4", "3", "2", "1", "1"], ["1", "ArrowUp", "2", "2", "3", "4", "5", "5"]),
}
DRIVER = """<script>
const keys = %s, wait = ms => new Promise(done => setTimeout(done, ms));
(async () => {
  for (const some of keys) {
    for (let i = 0; i < 100 && (!task || busy); i++) await wait(20);
    for (const key of some) {
      document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    }
    await wait(300);
  }
  document.title = "width " + document.documentElement.scrollWidth + " of " + innerWidth;
})();
</script></body>"""


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("kind", KEYS)
def test_the_keyboard_alone_operates_the_page_in_a_browser(tmp_path, monkeypatch, kind):
    """Keys choose by the shown order, which differs from the stored one; nothing is wider than the
    window."""
    original = serving.render

    def render(*names, **values):
        keys = json.dumps(KEYS[kind])
        return original(*names, **values).replace("</body>", DRIVER % keys)

    monkeypatch.setattr(serving, "render", render)
    dimensions = ("a", "b") if kind == "rate" else ("overall",)
    with Served(tmp_path, 3, kind=kind, dimensions=dimensions) as served:
        orders = [served.poll.next("anna", skip).order for skip in range(3)]
        document = read_in_browser(f"{served.url}/?annotator=anna", tmp_path / "profile", 6)
        rows = list(served.poll.table.rows.values())
    found = re.search(r"<title>width (\d+) of (\d+)</title>", document)
    assert found, document[-500:]
    assert int(found[1]) <= int(found[2])

    def stored(order, shown):
        values = [0] * 3
        for place, index in enumerate(order):
            values[index] = shown[place]
        return values

    answers = [row["ratings" if kind == "rate" else "ranks"] for row in rows]
    if kind == "best":  # the second vote was undone, then the same question came again
        expected = [{"overall": stored(orders[0], [2, 1, 2])}]
        expected += [{"overall": stored(orders[1], [2, 2, 1])}]
    elif kind == "rank":
        expected = [{"overall": stored(orders[0], [2, 3, 1])}]
        expected += [{"overall": stored(orders[1], [2, 1, 2])}]
    else:
        expected = [{"a": stored(orders[0], [5, 3, 1]), "b": stored(orders[0], [4, 2, 1])}]
        expected += [{"a": stored(orders[1], [2, 3, 5]), "b": stored(orders[1], [2, 4, 5])}]
    assert answers == expected


@pytest.mark.slow
def test_killing_the_server_loses_no_vote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        for copy in range(2):
            Image.new("RGB", (8, 8), (number * 40, copy * 90, 0)).save(
                tmp_path / f"{number}{copy}.png"
            )
            (tmp_path / f"{number}{copy}.txt").write_text(f"prompt {number}")
    command = [python(), "-m", "flowalign", "vote", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    found = None
    while not found:
        found = re.search(r"http://127.0.0.1:(\d+)", process.stderr.readline())
    for _ in range(3):
        state = json.loads(ask(int(found[1]), "/next?annotator=anna")[1])
        answer = {"annotator": "anna", "question": state["question"]["id"], "seconds": 1}
        assert ask(int(found[1]), "/vote", answer | {"answers": {"overall": [1, 2]}})[0] == 200
    process.send_signal(signal.SIGKILL)
    process.communicate()
    counts = []
    monkeypatch.setattr(vote, "_serve", lambda args, poll, *_: counts.append(poll.count("anna")))
    assert run_verb(parse(command[3:])) == 0
    assert counts == [(3, 1)]


def test_votes_on_folders_of_one_name_are_kept_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vote, "_serve", lambda *_: None)
    for parent in ("a", "b"):
        folder = tmp_path / parent / "images"
        folder.mkdir(parents=True)
        for copy in range(2):
            Image.new("RGB", (8, 8), (copy * 90, 0, 0)).save(folder / f"{copy}.png")
            (folder / f"{copy}.txt").write_text("a square")
        assert run_verb(parse(["vote", str(folder)])) == 0
    assert len(set(re.findall(r"runs/votes/images-\w+", capsys.readouterr().err))) == 2
