"""`flowalign score`, from the command to the exit code."""

import json
import os
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from pyarrow import parquet

from flowalign.cli import score as score_command
from flowalign.cli.main import parse
from flowalign.curation.scoring import scoring_job as scoring
from flowalign.curation.scoring.scores_page import average_prompts
from flowalign.utils.subprocesses import shard_jobs
from tests.fixtures.chat_server import MODEL, ChatServer, Reply
from tests.fixtures.commands import exit_code
from tests.fixtures.scoring_rewards import Brightness, picture
from tests.fixtures.tables import jsonl
from tests.fixtures.zygote import python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
REWARD = "tests.fixtures.scoring_rewards.Brightness"


def dataset(folder: Path, count: int, missing: int = 0) -> str:
    rows = []
    for k in range(count):
        picture(folder / f"{k}.png", k, ((12, 8), (8, 12))[k % 2])
        rows.append({"prompt": f"prompt {k}", "image": f"{k}.png", "ratings": [k / 4]})
    for k in range(missing):
        (folder / f"{k}.png").unlink()
    return jsonl(folder, *rows)


def score(*argv: object) -> int:
    return score_command.run(parse(["score", *map(str, argv)]))


def rows(folder: Path, kind: str = "parquet") -> list[dict]:
    if kind == "parquet":
        return parquet.read_table(folder / "scores.parquet").to_pylist()
    return [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(scoring, "RECORDS_PER_PART", 8)


def test_both_formats_hold_the_same_rows_and_zero_says_that_all_is_well(tmp_path):
    data, out = dataset(tmp_path, 20), tmp_path / "out"
    assert score(data, "--rewards", REWARD, "--out", out) == 0
    assert score(data, "--rewards", REWARD, "--out", out, "--format", "jsonl") == 0
    table = parquet.read_table(out / "scores.parquet")
    assert table.to_pylist() == rows(out, "jsonl")
    assert [row["prompt"] for row in rows(out)] == [f"prompt {k}" for k in range(20)]
    types = {field.name: str(field.type) for field in table.schema}
    columns = [types[name] for name in ("medium", "brightness", "brightness_valid")]
    assert columns == ["int64", "double", "bool"]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["schema"], summary["rows"]) == ("complete", "generic", 20)
    assert summary["fingerprint"] == rows(out)[0]["fingerprint"]
    assert "brightness" in (out / "scores.html").read_text()


def test_several_rewards_of_a_file_are_columns_of_one_table(tmp_path):
    data = dataset(tmp_path, 3)
    rewards = tmp_path / "rewards.yaml"
    rewards.write_text(
        f"rewards:\n- class_path: {REWARD}\n- class_path: tests.fixtures.scoring_rewards.Still\n"
    )
    assert score(data, "--rewards", rewards, "--out", tmp_path / "out") == 0
    assert all(row["redness_valid"] and row["contrast_valid"] for row in rows(tmp_path / "out"))


def test_too_many_failures_are_exit_code_1_and_the_summary_says_so(tmp_path, capsys):
    data, out = dataset(tmp_path, 20, missing=3), tmp_path / "out"
    assert score(data, "--rewards", REWARD, "--out", out) == 1
    assert "3 of 20 rows failed" in capsys.readouterr().err
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["failed"], summary["reasons"]) == (3, {"missing file": 3})
    assert [row["brightness_valid"] for row in rows(out)] == [False] * 3 + [True] * 17
    assert score(data, "--rewards", REWARD, "--out", out, "--max_failed_fraction", 0.15) == 0


def test_a_job_that_stops_early_leaves_a_summary(tmp_path):
    data, out = dataset(tmp_path, 200, missing=100), tmp_path / "out"
    assert score(data, "--rewards", REWARD, "--out", out) == 1
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["rows"], summary["failed"]) == ("stopped", 104, 100)
    assert not (out / "scores.parquet").exists()


def test_a_job_that_an_outage_stopped_is_finished_by_the_same_command(tmp_path, capsys):
    data, out = dataset(tmp_path, 120), tmp_path / "out"
    rating = "Alignment: 3\nCoherence: 3\nStyle: 3"
    with ChatServer(lambda request: Reply(status=503)) as chat:
        server = {"url": chat.url, "model": MODEL, "attempts": 1}
        judge = {"class_path": "reward_models.UnifiedRewardPoint", "init_args": {"server": server}}
        rewards = tmp_path / "rewards.yaml"
        rewards.write_text(json.dumps({"rewards": [judge]}))
        assert score(data, "--rewards", rewards, "--out", out) == 1
        assert "104 of 104 rows failed" in (why := capsys.readouterr().err)
        assert "HTTP 503, after 1 attempts (may pass)" in why
        chat.answer = lambda request: rating
        assert score(data, "--rewards", rewards, "--out", out) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["rows"], summary["failed"], summary["reasons"]) == (120, 0, {})
    assert all(row["reason"] is None for row in rows(out))


def test_broken_links_are_counted_as_failed_rows(tmp_path, capsys):
    folder, out = tmp_path / "media", tmp_path / "out"
    folder.mkdir()
    for k in range(9):
        picture(folder / f"{k}.png", k)
    (folder / "9.png").symlink_to("gone.png")
    assert score(folder, "--rewards", REWARD, "--out", out) == 1
    assert "1 of 10 rows failed" in capsys.readouterr().err
    assert rows(out)[9]["reason"] == f"broken link: {folder / '9.png'} points to gone.png"
    assert score(folder, "--rewards", REWARD, "--out", out, "--max_failed_fraction", 0.1) == 0


def test_shards_of_tar_files_are_scored_and_shown(tmp_path):
    for k in range(3):
        picture(tmp_path / f"{k}.png", k)
        (tmp_path / f"{k}.txt").write_text(f"prompt {k}")
        with tarfile.open(tmp_path / f"{k:02}.tar", "w") as archive:
            for ending in ("png", "txt"):
                archive.add(tmp_path / f"{k}.{ending}", f"{k}.{ending}")
    data, out = f"{tmp_path}/{{00..02}}.tar", tmp_path / "out"
    assert score(data, "--rewards", REWARD, "--out", out, "--processes", 2) == 0
    assert [row["record"] for row in rows(out)] == ["00/0", "01/1", "02/2"]
    assert [row["prompt"] for row in rows(out)] == ["prompt 0", "prompt 1", "prompt 2"]
    assert all(row["brightness_valid"] and row["path"] is None for row in rows(out))
    assert "data:image/" in (out / "scores.html").read_text()


def test_other_settings_are_refused_by_name_before_anything_is_loaded(tmp_path, monkeypatch):
    data, out = dataset(tmp_path, 4), tmp_path / "out"
    assert score(data, "--rewards", REWARD, "--out", out) == 0
    with monkeypatch.context() as patch:
        patch.setattr("tests.fixtures.scoring_rewards.Brightness.load", pytest.fail)
        with pytest.raises(ValueError, match="limit differ;\nlimit was 'None', now '3'"):
            score(data, "--rewards", REWARD, "--out", out, "--limit", 3)
        with pytest.raises(ValueError, match="rewards differ"):
            score(data, "--rewards", "tests.fixtures.scoring_rewards.Still", "--out", out)
    with Path(data).open("a") as file:
        file.write('{"prompt": "more", "image": "0.png"}\n')
    with pytest.raises(ValueError, match="identity differ"):
        score(data, "--rewards", REWARD, "--out", out)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_folder_with_its_results_and_other_files_continues_and_follows_its_captions(
    tmp_path, kind
):
    """The job is repeated with its own output, votes and files of the system in the folder."""
    for k in range(3):
        picture(tmp_path / f"{k}.png", k)
        (tmp_path / f"{k}.txt").write_text("a red cat")
    command = (tmp_path, "--rewards", REWARD, "--out", tmp_path / "out", "--format", kind)
    assert score(*command) == 0
    (tmp_path / ".DS_Store").write_bytes(b"\0")
    (tmp_path / "votes").mkdir()
    (tmp_path / "votes" / "votes.jsonl").write_text("{}\n")
    (tmp_path / "1.txt").write_text("a tan dog")
    assert score(*command) == 0
    found = rows(tmp_path / "out", kind)
    assert [row["prompt"] for row in found] == ["a red cat", "a tan dog", "a red cat"]
    picture(tmp_path / "3.png", 3)
    with pytest.raises(ValueError, match="identity differ"):
        score(*command)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max_failed_fraction", 2, "is 2.0; it must be at least 0 and at most 1"),
        ("--processes", 10_000, "--processes is 10000, but this machine has"),
        ("--schema", "pick", "schema is 'pick'; there are auto"),
        ("--root", "nowhere", "'nowhere', does not exist"),
        ("--rewards", "JpegSize", "such as reward_models.JpegSize"),
    ],
)
def test_wrong_options_are_refused(tmp_path, option, value, message):
    data = dataset(tmp_path, 1)
    with pytest.raises(ValueError, match=message):
        score(data, "--rewards", REWARD, "--out", tmp_path / "out", option, value)
    assert not (tmp_path / "out").exists()


def test_shards_run_by_hand_are_merged_by_a_run_without_one(tmp_path):
    data, out = dataset(tmp_path, 40), tmp_path / "out"
    log = tmp_path / "log"
    rewards = tmp_path / "rewards.yaml"
    rewards.write_text(f"rewards:\n- class_path: {REWARD}\n  init_args:\n    log: {log}\n")
    for i in range(2):
        assert score(data, "--rewards", rewards, "--out", out, "--shard", f"{i}/2") == 0
        assert not (out / "scores.parquet").exists()
    assert score(data, "--rewards", rewards, "--out", out) == 0
    assert [row["prompt"] for row in rows(out)] == [f"prompt {k}" for k in range(40)]
    assert len(log.read_text().splitlines()) == 40


def test_a_summary_of_prompts_has_the_means_of_their_samples(tmp_path):
    dataset(tmp_path, 4)
    samples = [{"prompt": f"prompt {k % 2}", "image": f"{k}.png"} for k in range(4)]
    options = ("--rewards", REWARD, "--out", tmp_path / "out", "--summarize", "usual_")
    assert score(jsonl(tmp_path, *samples), *options) == 0
    lines = (tmp_path / "out/prompts.jsonl").read_text().splitlines()
    table = rows(tmp_path / "out")
    assert len({row["brightness"] for row in table}) == 4
    for k in range(2):
        dims = "brightness", "contrast"
        means = {f"usual_{dim}": (table[k][dim] + table[k + 2][dim]) / 2 for dim in dims}
        assert json.loads(lines[k]) == {"prompt": f"prompt {k}"} | means
    assert len(lines) == 2


def test_samples_without_a_prompt_have_no_summary():
    row = {"record": "7", "prompt": "", "brightness": 1.0, "brightness_valid": True}
    with pytest.raises(ValueError, match=r"record 7 has no prompt; --summarize averages"):
        average_prompts([row], "usual_")
    with pytest.raises(ValueError, match=r"record 7 has references; --summarize averages"):
        average_prompts([row | {"prompt": "a", "references": ["a.png"]}], "usual_")
    failed = row | {"prompt": "a", "brightness": None, "brightness_valid": False}
    assert average_prompts([failed], "usual_") == [{"prompt": "a"}]


def test_the_limit_is_of_records(tmp_path):
    data = dataset(tmp_path, 20)
    assert score(data, "--rewards", REWARD, "--out", tmp_path / "out", "--limit", 11) == 0
    assert len(rows(tmp_path / "out")) == 11


def test_each_of_several_processes_gets_the_same_options(tmp_path):
    words = "score data --rewards r --out o --processes 3 --limit 7 --max_failed_fraction 0.5"
    args = parse(words.split())
    command = shard_jobs(args.words, 3, Path(), ["--summarize"])[1].command
    again = parse(command[3:])
    assert (again.shard, again.processes) == ((1, 3), 1)
    same = set(vars(args)) - {"shard", "processes", "words", "command"}
    assert {name: vars(again)[name] for name in same} == {name: vars(args)[name] for name in same}


def command(data: str, out: Path, *options: str) -> list[str]:
    words = f"-m flowalign score {data} --rewards {REWARD} --out {out} --format jsonl"
    return [python(), *words.split(), *options]


@pytest.mark.timeout(900)
def test_processes_one_of_which_is_killed_end_in_the_same_table(tmp_path):
    data = dataset(tmp_path, 600)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    assert score(data, "--rewards", REWARD, "--out", tmp_path / "one", "--format", "jsonl") == 0
    out = tmp_path / "two"
    words = command(data, out, "--shard", "0/2")
    victim = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    while not list(out.glob("parts/*.jsonl")):
        time.sleep(0.01)
        assert victim.poll() is None
    victim.send_signal(signal.SIGKILL)
    victim.communicate()  # until the process has ended as well
    assert victim.returncode == -signal.SIGKILL
    subprocess.run(command(data, out, "--processes", "2"), cwd=ROOT, env=environment, check=True)
    assert (out / "scores.jsonl").read_bytes() == (tmp_path / "one/scores.jsonl").read_bytes()


def test_a_shard_whose_model_is_wrong_says_so_in_its_last_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Brightness, "score", lambda self, batch: None)
    words = [dataset(tmp_path, 3), "--rewards", REWARD, "--out", tmp_path / "out", "--shard", "0/1"]
    assert exit_code("score", *map(str, words)) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "flowalign: reward 'brightness' (dimensions brightness, contrast) returned"
    )


def test_another_code_of_a_reward_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = """
import torch
from flowalign.types import RewardModel, RewardOutput, RewardSpec

class Constant(RewardModel):
    def __init__(self):
        self.spec = RewardSpec("constant", ("constant",), "any", (0.0, 1.0), "none")

    def score(self, batch):
        failed = self.spec.screen(batch)
        return RewardOutput.build(self.spec, torch.full((len(batch), 1), 0.5), failed)
"""
    file = tmp_path / "constant_reward.py"
    file.write_text(code)
    command = (dataset(tmp_path, 2), "--rewards", "constant_reward.py:Constant", "--out", "out")
    assert score(*command) == score(*command) == 0
    file.write_text(code.replace("0.5", "0.75"))
    with pytest.raises(ValueError, match="made with other settings: code differ"):
        score(*command)
