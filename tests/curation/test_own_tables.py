"""A table with column names of its own is scored, becomes pairs, and trains."""

import csv
import json
from pathlib import Path

import pytest
from pyarrow import parquet

from flowalign.data.preference.dataset import PreferenceDataset
from flowalign.data.readers import open_dataset
from tests.fixtures.commands import exit_code
from tests.fixtures.scoring_rewards import picture
from tests.fixtures.tables import jsonl

BRIGHTNESS = "tests.fixtures.scoring_rewards.Brightness"
SECOND = "tests.fixtures.scoring_rewards.Wins"


@pytest.fixture
def votes(tmp_path: Path) -> Path:
    """Write a table of a data engineer: two images, a caption and the votes of two annotators."""
    rows = []
    for k in range(6):
        for side in "ab":
            picture(tmp_path / f"{k}{side}.png", 2 * k + (side == "b"))
        left, right = ([2, 0], [1, 1], [0, 2])[k % 3]
        files = {"left": f"{k}a.png", "right": f"{k}b.png"}
        rows.append(
            {"caption": f"fox {k}", **files, "votes": [left, right], "batch": k, "who": "x"}
        )
    rows[-1]["batch"] = "last"
    return Path(jsonl(tmp_path, *rows))


def test_own_columns_are_mapped_and_stay_in_the_table(votes, tmp_path):
    columns = ["prompt=caption", "images=left,right"]
    out = tmp_path / "out"
    words = ["score", votes, "--columns", *columns, "--rewards", BRIGHTNESS, SECOND, "--out", out]
    assert exit_code(*map(str, words)) == 0
    rows = parquet.read_table(out / "scores.parquet").to_pylist()
    assert [row["prompt"] for row in rows[::2]] == [f"fox {k}" for k in range(6)]
    assert [row["batch"] for row in rows[::2]] == ["0", "1", "2", "3", "4", "last"]
    assert {row["who"] for row in rows} == {"x"}
    assert {"brightness", "wins", "votes/overall"} <= rows[0].keys()
    assert "columns" not in rows[0]

    pairs = tmp_path / "pairs"
    words = ["pairs", out, "--rule", "best_worst", "--dimensions", "votes/overall", "--out", pairs]
    assert exit_code(*map(str, words), "--held_out", "0") == 0
    made = [json.loads(line) for line in (pairs / "train.jsonl").read_text().splitlines()]
    sides = [(Path(row["chosen"]).name, Path(row["rejected"]).name) for row in made]
    assert sides == [
        ("0a.png", "0b.png"), ("2b.png", "2a.png"), ("3a.png", "3b.png"), ("5b.png", "5a.png")
    ]  # fmt: skip
    examples, report = PreferenceDataset(path=str(pairs / "train.jsonl")).read()
    assert (len(examples), report.total) == (4, 0)


def test_a_csv_file_of_pairs_is_scored_by_its_own_names(tmp_path):
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "good", "bad", "valid"])
        for k in range(3):
            picture(tmp_path / f"{k}.png", k)
            picture(tmp_path / f"{k}x.png", k + 5)
            writer.writerow([f"a fox {k}", f"{k}.png", f"{k}x.png", "yes"])
    words = ["score", tmp_path / "pairs.csv", "--columns", "chosen=good", "rejected=bad"]
    words += ["prompt=text", "--rewards", BRIGHTNESS, "--out", tmp_path / "out"]
    assert exit_code(*map(str, words)) == 0
    rows = parquet.read_table(tmp_path / "out/scores.parquet").to_pylist()
    assert [(row["prompt"], row["rank/overall"]) for row in rows[:2]] == [
        ("a fox 0", 1.0),
        ("a fox 0", 2.0),
    ]
    assert rows[0]["valid"] == "yes"


def test_a_folder_without_prompts_is_one_message_with_the_remedy(tmp_path, capsys):
    for k in range(3):
        picture(tmp_path / "images" / f"{k}.png", k)
    words = ["score", tmp_path / "images", "--rewards", "reward_models.HPSv2"]
    assert exit_code(*map(str, words), "--out", str(tmp_path / "out")) == 2
    told = capsys.readouterr().err
    assert "has no prompts, which hpsv2_1 needs" in told
    assert "--columns prompt=COLUMN" in told
    assert len(told.splitlines()) <= 5


@pytest.mark.slow
def test_own_pairs_train_with_dpo(tmp_path):
    """The newcomer with a table of pairs maps its columns, and trains."""
    rows = []
    for k in range(4):
        for side in "ab":
            picture(tmp_path / f"{k}{side}.png", 2 * k + (side == "b"), (32, 32))
        rows.append({"caption": f"a red circle {k}", "good": f"{k}a.png", "bad": f"{k}b.png"})
    data = tmp_path / "own.json"
    data.write_text(json.dumps(rows))
    settings = [f"--recipe.data.path={data}", "--recipe.data.held_out=null"]
    settings += ["--recipe.data.columns={prompt: caption, chosen: good, rejected: bad}"]
    settings += ["--num_steps=1", "--recipe.data.batch_size=4", f"--output_dir={tmp_path / 'run'}"]
    settings += ["--evaluation=null", "--recipe.data.cache=null", "--checkpoints.verify=never"]
    assert exit_code("train", "configs/preference/shapes/dpo.yaml", *settings) == 0
    (line,) = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert "implicit_accuracy" in json.loads(line)


@pytest.mark.slow
def test_own_images_become_pairs_and_train_with_dpo(tmp_path):
    """The data engineer with a table of images: score by own column names, pairs, DPO."""
    lines = ["filename,caption,split"]
    for k in range(4):
        for side in "ab":
            picture(tmp_path / f"{k}{side}.png", 2 * k + (side == "b"), (32, 32))
            lines.append(f"{k}{side}.png,a red circle {k},train")
    (tmp_path / "own.csv").write_text("\n".join(lines))
    scores, pairs = tmp_path / "scores", tmp_path / "pairs"
    reward = "reward_models.JpegSize"
    columns = ["--columns", "image=filename", "prompt=caption"]
    data = tmp_path / "own.csv"
    assert exit_code("score", data, "--rewards", reward, "--out", scores, *columns) == 0
    options = ["--rule", "best_worst", "--held_out", "0", "--out", pairs]
    assert exit_code("pairs", scores, *options) == 0
    rows = [json.loads(line) for line in (pairs / "train.jsonl").read_text().splitlines()]
    assert sorted(row["prompt"] for row in rows) == [f"a red circle {k}" for k in range(4)]
    settings = [f"--recipe.data.path={pairs / 'train.jsonl'}", "--recipe.data.held_out=null"]
    settings += ["--num_steps=1", "--recipe.data.batch_size=4", f"--output_dir={tmp_path / 'run'}"]
    settings += ["--evaluation=null", "--recipe.data.cache=null", "--checkpoints.verify=never"]
    assert exit_code("train", "configs/preference/shapes/dpo.yaml", *settings) == 0
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_prompts_of_an_own_table_train_and_are_sampled(tmp_path):
    """The author of a script with a CSV of prompts names its column."""
    data = tmp_path / "captions.csv"
    rows = [f"{k},a red circle" for k in range(3)] + ['3,"two blue squares"']
    data.write_text("\n".join(["number,caption", *rows]))
    named = f"{data}:caption"
    settings = ["--num_steps=1", "--evaluation=null", f"--output_dir={tmp_path / 'run'}"]
    settings += ["--recipe.prompts_per_step=2", "--recipe.sampling.samples_per_prompt=2"]
    assert exit_code("train", "configs/shapes.yaml", f"--recipe.prompts={named}", *settings) == 0
    out = tmp_path / "images"
    assert (
        exit_code("sample", "configs/shapes.yaml", "--prompts", named, "--count", "1", "--out", out)
        == 0
    )
    listed = [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in listed] == ["a red circle"] * 3 + ["two blue squares"]


def test_the_rows_of_the_documentation_are_read(tmp_path):
    page = Path("docs/guides/score_a_dataset.md").read_text()
    blocks = [block.partition("```")[0] for block in page.split("```text\n")[1:]]
    for k in range(3):
        picture(tmp_path / f"fox_{k}.png", k)
    found = []
    for i, block in enumerate(blocks):
        (tmp_path / f"{i}.jsonl").write_text(block)
        found += open_dataset(str(tmp_path / f"{i}.jsonl"))
    assert not [record.problem for record in found if record.problem]
    assert found[0].votes == {"overall": [2, 0]}
    assert found[1].ranks == {"overall": [1, 3, 2]}
    assert found[2].ratings == {"quality": [4, 2.5], "match": [5, 1]}
    assert found[3].ranks == {"overall": [1, 2]}
