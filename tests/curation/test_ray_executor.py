"""Workers of a Ray cluster make the table of one process, also when one of them is killed."""

import ast
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from flowalign.cli.main import main
from flowalign.curation.scoring import ray_data
from flowalign.curation.scoring import scoring_job as scoring
from flowalign.curation.scoring.part_files import PartFiles
from flowalign.curation.scoring.ray_data import BlockScorer
from flowalign.data.readers import open_dataset
from flowalign.rewards.checked import RewardFailure
from flowalign.utils.ray_cluster import join_cluster
from tests.fixtures.ray_nodes import two_machines
from tests.fixtures.scorers import Mortal
from tests.fixtures.scoring_rewards import Brightness, picture
from tests.fixtures.tables import jsonl
from tests.fixtures.zygote import python

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
COUNT = 1300


def pictures(folder: Path, count: int) -> Path:
    """Images of two shapes including a damaged one; their prompts are their numbers."""
    folder.mkdir()
    rows = []
    for k in range(count):
        picture(folder / f"{k}.png", k, ((6, 4), (4, 6))[k % 2])
        rows.append({"id": f"r{k}", "prompt": f"{k}", "images": [f"{k}.png"]})
    (folder / f"{count // 3}.png").write_bytes(b"no picture")
    return Path(jsonl(folder, *rows))


def score(
    data: Path,
    out: Path,
    calls: Path,
    *options: str,
    dies_at: tuple[int, ...] = (),
    gate: Path | str = "",
) -> str:
    """Run `flowalign score` in a separate process; return its output."""
    calls.mkdir(exist_ok=True)
    file = out.parent / f"{out.name}.yaml"
    about = {"folder": str(calls), "dies_at": list(dies_at), "gate": str(gate)}
    entry = {"class_path": "tests.fixtures.scorers.Mortal", "init_args": about}
    other = {"class_path": "tests.fixtures.scoring_rewards.Brightness"}
    file.write_text(yaml.safe_dump({"rewards": [entry, other]}))
    command = [python(), "-m", "flowalign", "score", data, "--rewards", file, "--out", out]
    command += ["--format", "jsonl", "--workers", "1", *options]
    done = subprocess.run(map(str, command), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def machines():
    with two_machines() as made:
        yield made


@pytest.mark.slow
def test_a_killed_worker_and_a_killed_machine_lose_no_row_and_repeat_none(tmp_path, machines):
    data, calls = pictures(tmp_path / "data", COUNT), tmp_path / "calls"
    score(data, tmp_path / "plain", tmp_path / "plain_calls")
    ray = "--executor", "ray", "--processes", "2", "--address", machines.address

    def processes() -> set[str]:
        return {words[0] for path in calls.glob("*") if (words := path.read_text().split())}

    with ThreadPoolExecutor() as pool:
        out, gate = tmp_path / "ray", tmp_path / "gate"
        scored = pool.submit(score, data, out, calls, *ray, dies_at=(10,), gate=gate)
        try:
            while len(processes()) < 3 and not scored.done():  # two, and one more after a kill
                time.sleep(0.05)
            machines.kill_second()  # whose worker waits in the middle of a block
        finally:
            gate.touch()
        scored.result()
    tables = [(tmp_path / name / "scores.jsonl").read_text() for name in ("plain", "ray")]
    assert tables[0] == tables[1]
    rows = [json.loads(line) for line in tables[1].splitlines()]
    assert len({row["record"] for row in rows}) == len(rows) == COUNT
    (failed,) = [row for row in rows if not row["brightness_valid"]]
    assert failed["brightness"] is None
    assert failed["reason"]
    assert len(processes()) == 4, "another worker came in place of the one that left"


@pytest.mark.slow
def test_workers_that_always_die_end_the_job(tmp_path, machines, monkeypatch):
    monkeypatch.setattr(ray_data, "RESTARTS", 1)
    data, calls = pictures(tmp_path / "data", 9), tmp_path / "calls"
    calls.mkdir()

    def open_job() -> scoring.ScoringJob:
        models = [Mortal(str(calls), [-1])]
        return scoring.ScoringJob(open_dataset(str(data)), models, tmp_path / "out", 3, 1, 9)

    cluster = ray_data.ScoringCluster(1, machines.address, open_job)
    with pytest.raises(RewardFailure, match="a worker died more than 1 times"):
        cluster.run(open_job(), scoring.Progress())
    assert len(list(calls.iterdir())) == 2


@pytest.mark.slow
def test_a_cluster_of_this_machine_listens_on_the_loopback_only_and_reports_nothing():
    pytest.importorskip("psutil")
    code = """
import os, psutil
from flowalign.utils.ray_cluster import connect
with connect(1):
    here = psutil.Process()
    ours = {here.pid, *(child.pid for child in here.children(True))}
    found = [c for c in psutil.net_connections("inet") if c.pid in ours]
    print(sorted({c.laddr.ip for c in found if c.status == "LISTEN"}))
    print(os.environ["RAY_USAGE_STATS_ENABLED"])
"""
    command = [python(), "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    addresses, usage = said.splitlines()
    assert set(ast.literal_eval(addresses)) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert addresses != "[]"
    assert usage == "0"


def test_blocks_are_scored_in_any_order_once(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "RECORDS_PER_PART", 4)
    data = pictures(tmp_path / "data", 14)

    def job(folder: str, log: str = ""):
        model = Brightness(log)
        model.load()
        return scoring.ScoringJob(open_dataset(str(data)), [model], tmp_path / folder, 3, 1, 14)

    whole, some = job("whole"), job("some", str(tmp_path / "log"))
    assert scoring.run(whole, scoring.Progress()) == [0, 1, 2, 3]
    worker = BlockScorer(some)
    for block in (2, 3, 0, 2, 1):
        worker.score(block)
    rows = [list(PartFiles(what.folder / "parts").rows(range(4))) for what in (whole, some)]
    assert rows[0] == rows[1]
    assert len((tmp_path / "log").read_text().splitlines()) == 13


def test_a_cluster_with_too_few_cores_left_is_told_once(monkeypatch, capsys):
    import ray

    looks = iter([2.0, 1.0, 1.0, 2.0])
    seen = threading.Event()

    def resources():
        if (cores := next(looks, None)) is None:
            seen.set()
        return {"CPU": 2.0 if cores is None else cores}

    monkeypatch.setattr(ray, "cluster_resources", resources)
    monkeypatch.setattr(ray_data, "SECONDS_BETWEEN_LOOKS", 0.001)
    with ray_data.ScoringCluster(2, None, pytest.fail)._watch_machines():
        assert seen.wait(10)
    said = capsys.readouterr().err
    assert said.count("a machine left the cluster, which has 1 cores for 2 workers") == 1
    assert "repeat it with --processes 1" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address", "auto"], "--address needs --executor ray"),
        (["--executor", "ray", "--shard", "0/2"], "--shard excludes --executor ray"),
        (["--executor", "ray", "--processes", "9999"], "give at most"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, capsys, options, message):
    rewards = "reward_models.JpegSize"
    words = ["score", "x", "--rewards", rewards, "--out", str(tmp_path / "out"), *options]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_missing_ray_is_refused_with_its_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.data", None)
    words = ["score", "x", "--rewards", "y", "--out", str(tmp_path / "out"), "--executor", "ray"]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "pip install 'flowalign-diffusion[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "127.0.0.1:99999"])
def test_a_cluster_that_does_not_answer_is_refused_in_seconds(address):
    with pytest.raises(ValueError, match=rf"--address {address} does not answer"):
        join_cluster(1, address)
