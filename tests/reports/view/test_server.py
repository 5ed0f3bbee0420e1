"""Requests to the page about all runs: served files, and files that are never served."""

import http.client
import re
import threading

import numpy as np
import pytest

from flowalign.cli.dispatch import run_verb
from flowalign.cli.main import build_parser
from flowalign.reports.view import server as serving
from tests.fixtures.browser import needs_browser, read_in_browser
from tests.fixtures.fake_run import fake_run, rows, write_rows


@pytest.fixture
def root(tmp_path):
    folder = fake_run(tmp_path / "runs" / "my run")
    (folder / "report.html").write_text("<p>the report</p>")
    (folder / "model.safetensors").write_text("weights")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "runs" / "link.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "runs" / "folder").symlink_to(tmp_path)
    (tmp_path / "runs" / "circle.txt").symlink_to("circle.txt")
    (tmp_path / "runs" / ".hidden.txt").write_text("hidden")
    return tmp_path / "runs"


@pytest.fixture
def served(root):
    """The server on a free port, in a thread."""
    with serving.ViewServer(root, "127.0.0.1", 0, 1.0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def test_the_page_and_the_files_that_it_shows_are_served(served):
    answer, content = ask(served, "/?run=my+run")
    assert answer.status == 200
    assert b"my run" in content
    picture = re.search(rb'<img src="(.*?)"', content)[1].decode()
    answer, content = ask(served, picture)
    assert (answer.status, answer.headers["Content-Type"]) == (200, "image/png")
    assert content[1:4] == b"PNG"
    report = re.search(rb'href="(.*?report.html)"', ask(served, "/")[1])[1].decode()
    assert ask(served, report)[1] == b"<p>the report</p>"


@pytest.mark.parametrize(
    "path",
    [
        "/files/../secret.txt",
        "/files/%2e%2e/secret.txt",
        "/files/my%20run/../../secret.txt",
        "/files/my%20run%2f..%2f..%2fsecret.txt",
        "/files//etc/hosts.txt",
        "/files/%2fetc%2fhosts.txt",
        "/files/..%5csecret.txt",
        "/files/link.txt",
        "/files/folder/secret.txt",
        "/files/circle.txt",
        "/files/.hidden.txt",
        "/files/my%20run/model.safetensors",
        "/files/my%20run",
        "/files/my%20run/samples",
        "/files/",
        "/files/a%00.txt",
        "/files/" + "x" * 5000 + ".txt",
        "/secret.txt",
        "//secret.txt",
        "/%3C",
    ],
)
def test_nothing_else_is_served(served, path):
    answer, content = ask(served, path)
    assert answer.status == 404
    assert b"secret" not in content
    assert b"hidden" not in content


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(served, method):
    assert ask(served, "/files/my%20run/report.html", method)[0].status == 501


def test_a_request_for_the_head_has_no_body(served):
    answer, content = ask(served, "/files/my%20run/report.html", "HEAD")
    assert (answer.status, answer.headers["Content-Length"], content) == (200, "17", b"")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8412", "", "127.0.0.1.evil.example:1"]
)
def test_a_page_elsewhere_that_pretends_to_be_here_is_refused(served, host):
    assert ask(served, "/", Host=host)[0].status == 403
    assert ask(served, "/", Host=f"LocalHost:{served.server_port}")[0].status == 200


def test_what_a_page_may_load_is_itself_and_nothing_from_elsewhere(served):
    for path, connect in (("/", "'self'"), ("/files/my%20run/report.html", "'none'")):
        policy = ask(served, path)[0].headers["Content-Security-Policy"]
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert rules["default-src"] == "'none'"
        assert rules["connect-src"] == connect


def call(*argv):
    try:
        return run_verb(build_parser().parse_args(["view", *map(str, argv)]))
    except SystemExit as refusal:
        return refusal.code


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "65536"], "--port is 65536; it must be in [0, 65535]"),
        (["--port", "-1"], "--port is -1; it must be in [0, 65535]"),
        (["--every", "0"], "--every is 0; it must be a number in [1, 3600]"),
        (["--every", "nan"], "--every is nan; it must be a number in [1, 3600]"),
        (["--host", "no such host"], "cannot serve on --host no such host"),
    ],
)
def test_what_cannot_be_used_is_told_with_what_can(root, capsys, argv, words):
    assert call(root, *argv) == 2
    assert words in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_told(tmp_path, capsys):
    assert call(tmp_path / "nothing") == 2
    assert "nothing is no folder; name one with runs" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(served, root, capsys):
    assert call(root, "--port", served.server_port) == 2
    assert "--port 0 for any free port" in capsys.readouterr().err


def test_the_verb_serves_until_interrupted(root, monkeypatch, capsys):
    def interrupted(server):
        assert server.server_address[0] == "127.0.0.1"
        raise KeyboardInterrupt

    monkeypatch.setattr(serving.ViewServer, "serve_forever", interrupted)
    assert call(root, "--port", "0") == 0
    assert "on http://127.0.0.1:" in capsys.readouterr().err


def test_an_address_that_others_reach_is_served_with_a_warning(root, monkeypatch, capsys):
    monkeypatch.setattr(serving.ViewServer, "serve_forever", lambda server: None)
    assert call(root, "--port", "0", "--host", "0.0.0.0") == 0
    assert "everyone who can reach this machine can read the runs" in capsys.readouterr().err


@needs_browser
@pytest.mark.slow
def test_a_browser_shows_the_page_and_renews_it(served, root, tmp_path, monkeypatch):
    """A run advances by a step at every request, and its name does not become a script."""
    other = fake_run(root / "<img src=x onerror=document.title='broken'>")
    write_rows(other, rows(10))
    looks, original = [], serving.page

    def look(name, runs, wanted, more, every):
        looks.append(wanted)
        (folder,) = (run for run in runs if run.name == other.name)
        assert folder.content.done == 9 + len(looks)
        write_rows(other, rows(10 + len(looks)))
        return original(name, runs, wanted, more, every)

    monkeypatch.setattr(serving, "page", look)
    address = f"http://127.0.0.1:{served.server_port}/"
    document = read_in_browser(address, tmp_path / "profile", seconds=4)
    assert len(looks) >= 2
    bare = re.sub(r"\s*\n\s*", "", document)
    assert {int(n) for n in re.findall(r'<td class="n">(\d+)</td>', bare)} & {*range(11, 99)}
    assert "<title>runs - flowalign view</title>" in document
    assert "<canvas" in document
    assert "has stopped" not in document.partition("<script>")[0]


@needs_browser
@pytest.mark.slow
def test_a_browser_shows_the_values_under_the_pointer(root, tmp_path):
    from flowalign.reports.run_report import write_report

    report = write_report(root / "my run")
    point = """<script>
setTimeout(() => {
  const over = document.querySelector("figure[data-chart] .u-over");
  const box = over.getBoundingClientRect();
  over.dispatchEvent(new MouseEvent("mousemove", {bubbles: true,
    clientX: box.left + box.width / 2, clientY: box.top + box.height / 2}));
}, 1000);
</script></body>"""
    report.write_text(report.read_text().replace("</body>", point))
    document = read_in_browser(report.as_uri(), tmp_path / "profile")
    legend = document.partition('<table class="u-legend')[2].partition("</table>")[0]
    found = re.findall(
        r'<tr class="u-series(?: listed)?">.*?u-label">(.*?)<.*?u-value">(.*?)<', legend
    )
    values = {name: float(text) for name, text in found if text}
    row = rows()[int(values.pop("step"))]
    mean = {
        name: np.mean([r[metric] for r in rows()[row["step"] - 3 : row["step"] + 1]])
        for name, metric in NAMES.items()
    }
    assert values == {name: pytest.approx(value, rel=1e-3) for name, value in mean.items()}


NAMES = {"colour": "reward/colour", "exact_match": "reward/exact_match", "weighted": "reward_mean"}


@needs_browser
@pytest.mark.slow
def test_a_browser_plays_the_samples_of_a_run(served, tmp_path, monkeypatch):
    press = """<script>
document.querySelector(".film button").click();
setTimeout(() => {
  const at = document.querySelector(".at").textContent;
  document.title = at + " " + document.querySelector("figure .at").closest("figure")
    .querySelector("img").src.slice(-15);
}, 700);
</script></body>"""
    original = serving.page
    monkeypatch.setattr(
        serving, "page", lambda *values: original(*values).replace("</body>", press)
    )
    address = f"http://127.0.0.1:{served.server_port}/"
    document = read_in_browser(address, tmp_path / "profile", seconds=3)
    assert "<title>0 step-000000.png</title>" in document  # the first grid follows the last one
    assert "Pause</button>" in document
