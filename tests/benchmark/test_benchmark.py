"""Benchmarks from end to end on images of one pixel: shards, resume, errors, tables and page."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
import yaml

from flowalign.cli.main import main
from flowalign.studies.benchmark.external import _read_rows
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.run_files import write_pixels

pytestmark = pytest.mark.slow
PROMPTS = ["red", "a red", "very red", "red again", "the end"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Run file, card, prompt file and redder weights, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flowalign.studies.benchmark.statistics.REPEATS", 100)
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    rows = [{"prompt": p, "kind": "short" if len(p) < 6 else "long"} for p in PROMPTS]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"sampling": {"num_steps": 2, "samples_per_prompt": 2}}
    held_out = {"prompts": {"all": "prompts.txt"}, "num_prompts": 3, "micro_batch": 3}
    write_pixels(Path("run.yaml"), "prompts.txt", recipe, evaluation=held_out)
    write_card()
    policy = PixelPolicy()
    with torch.no_grad():
        policy.denoiser[-1].bias += torch.tensor([-1.0, 0.0, 0.0])
    Path("redder").mkdir()
    policy.save_weights("redder")
    return tmp_path


def write_card(fail_on="never", **prompts):
    card = {
        "title": "Redness & co",
        "source": "here",
        "prompts": {"file": "data.jsonl", "rows": 5, "distinct": 5, **prompts},
        "protocol": {"images_per_prompt": 4, "num_steps": 2, "seed": 3},
        "scorer": "Redness",
        "rewards": [
            {"class_path": "tests.fixtures.pixel.Redness", "init_args": {"fail_on": fail_on}}
        ],
        "metrics": [
            {"name": "redness", "dims": ["redness"], "over": "groups", "group": "kind"},
            {"name": "green", "dims": ["green"], "scale": 100},
        ],
        "published": [
            {"model": "M", "metric": "green", "value": 1, "settings": "none", "source": "x"}
        ],
    }
    Path("card.yaml").write_text(yaml.safe_dump(card))


def evaluate(*words, code=0):
    with pytest.raises(SystemExit) as ended:
        main(["eval", "run.yaml", "--benchmark", "card.yaml", *map(str, words)])
    assert ended.value.code == code


def refused(capsys, *words) -> str:
    evaluate(*words, code=2)
    said = capsys.readouterr().err.partition("flowalign: ")[2]
    assert len(said.splitlines()) <= 5, said
    return said


def fingerprint(out: str) -> dict[str, str]:
    """Hashes of all files."""
    files = sorted(path for path in Path(out).rglob("*") if path.is_file())
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def test_four_shards_and_a_resumed_run_write_what_one_run_writes(folder):
    options = "--data", "data.jsonl", "--weights", "redder"
    evaluate(*options, "--out", "whole")
    for i in range(4):
        evaluate(*options, "--out", "parts", "--shard", f"{i}/4")
    assert not Path("parts/results.json").exists()
    evaluate(*options, "--out", "parts")
    whole = fingerprint("whole")
    assert len(whole) == 2 * (20 + 7) + 5
    assert fingerprint("parts") == whole
    Path("parts/base/items/00002.json").unlink()
    Path("parts/base/media/000001-02.png").unlink()
    evaluate(*options, "--out", "parts")
    assert fingerprint("parts") == whole


def test_results_are_of_all_items_and_pair_the_models(folder):
    evaluate("--data", "data.jsonl", "--weights", "redder", "--out", "out")
    results = json.loads(Path("out/results.json").read_text())
    lines = {(line["metric"], line["group"]): line for line in results["lines"]}
    assert list(lines) == [
        ("redness", ""),
        ("redness", "short"),
        ("redness", "long"),
        ("green", ""),
    ]
    items = [
        item
        for block in sorted(Path("out/base/items").iterdir())
        for item in json.loads(block.read_text())["items"]
    ]
    by_row = torch.tensor([item["scores"]["redness"] for item in items]).view(5, 4).mean(1)
    short, long = by_row[[0, 1]].mean(), by_row[[2, 3, 4]].mean()
    line = lines["redness", ""]
    assert line["scores"][0]["value"] == pytest.approx(float(short + long) / 2)
    assert lines["redness", "short"]["scores"][0]["value"] == pytest.approx(float(short))
    (change,) = line["differences"]
    assert change["value"] == pytest.approx(line["scores"][1]["value"] - line["scores"][0]["value"])
    assert 0 < change["low"] < change["value"] < change["high"]
    assert change["high"] - change["low"] < line["scores"][0]["high"] - line["scores"][0]["low"]


def test_tables_and_page_hold_deviations_published_numbers_and_images(folder):
    evaluate("--data", "data.jsonl", "--weights", "redder", "--out", "out", "--count", "2")
    markdown, latex = (Path(f"out/results.{kind}").read_text() for kind in ("md", "tex"))
    assert markdown.startswith("| metric | prompts | base | redder | change |\n| --- |")
    assert "- Deviation: images per row is 2, the card says 4." in markdown
    assert "- Not fixed by the authors: guidance, here not set." in markdown
    assert "| M | green | 1 | none | x |" in markdown
    assert r"% Redness & co" in latex
    assert r"redness: short & 2 & " in latex
    page = Path("out/results.html").read_text()
    assert "Redness &amp; co" in page
    for heading in ("Best", "Worst", "Improved most"):
        assert f"<h2>{heading}</h2>" in page
    assert page.count("data:image/webp") == 2 * (5 + 5 + 5)  # both models, one image per prompt
    assert "<h2>Fell most</h2>" not in page


def test_wrong_prompt_files_are_refused_before_anything_is_made(folder, capsys):
    assert "needs its prompt file: give --data FILE" in refused(capsys)
    assert "prompts.txt has 4 rows; Redness & co has 5" in _refused_with(
        capsys, "prompts.txt", "\n".join(PROMPTS[:4])
    )
    assert "has 4 distinct prompts; Redness & co has 5" in _refused_with(
        capsys, "prompts.txt", "\n".join([*PROMPTS[:4], "red"])
    )
    write_card(sha256="0123abcd")
    assert "Redness & co has the SHA-256 0123abcd..." in refused(capsys, "--data", "data.jsonl")
    assert not Path("runs").exists()


def _refused_with(capsys, name, text):
    Path(name).write_text(text)
    return refused(capsys, "--data", name)


def test_options_that_contradict_each_other_are_refused(folder, capsys):
    data = "--data", "data.jsonl"
    assert "--benchmark 'nothing' is no benchmark; there are" in refused(
        capsys, *data, "--benchmark", "nothing"
    )
    assert "'nowhere' is not a folder" in refused(capsys, *data, "--weights", "nowhere")
    twice = "--weights", "redder", "--weights", "./redder"
    assert "names the same weights twice" in refused(capsys, *data, *twice)
    assert "--rewards and --scores exclude each other" in refused(
        capsys, *data, "--rewards", "a.yaml", "--scores", "b.jsonl"
    )
    assert "the scorers give compressibility; Redness & co needs redness, green" in refused(
        capsys, *data, "--rewards", "reward_models.JpegSize"
    )


def test_eval_without_a_benchmark_refuses_its_options(folder, capsys):
    with pytest.raises(SystemExit):
        main(["eval", "run.yaml", "--limit", "3"])
    assert "--limit needs --benchmark NAME" in capsys.readouterr().err


def test_a_failed_score_is_an_error_and_is_scored_again(folder, capsys):
    write_card(fail_on="very")
    said = refused(capsys, "--data", "data.jsonl", "--out", "out")
    assert "4 of 20 images of base have no score, the first is row 2, copy 0: told to" in said
    assert "never averaged" in said
    assert not Path("out/results.json").exists()
    before = fingerprint("out/base/media")
    refused(capsys, "--data", "data.jsonl", "--out", "out")
    assert fingerprint("out/base/media") == before


def test_shards_with_other_settings_are_refused(folder, capsys):
    options = "--data", "data.jsonl", "--out", "out"
    evaluate(*options, "--shard", "0/2")
    said = refused(capsys, *options, "--shard", "1/2", "--seed", "9")
    assert "made with other settings: seed differ" in said
    block = Path("out/base/items/00001.json")
    evaluate(*options, "--shard", "1/2")
    block.write_text(block.read_text().replace('"settings": "', '"settings": "0'))
    assert "00001.json was made with other settings" in refused(capsys, *options)


def test_missing_images_of_other_shards_are_made_and_never_ignored(folder, capsys):
    from flowalign.studies.benchmark.items import ModelFolder, collect, split_blocks

    evaluate("--data", "data.jsonl", "--out", "out", "--shard", "0/4")
    settings = json.loads(Path("out/base/items/00000.json").read_text())["settings"]
    with pytest.raises(ValueError, match="14 of 20 images of base are missing, the first is row 0"):
        collect(ModelFolder(Path("out/base"), settings, ".png"), split_blocks(5, 4, 3), (), "base")


def write_scores(change=lambda rows: rows):
    rows = [
        {"model": model, "row": row, "copy": 0, "redness": row + (model == "redder"), "green": 0.5}
        for model in ("base", "redder")
        for row in range(5)
    ]
    Path("scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in change(rows)))


def test_a_row_of_scores_may_hold_any_character_except_a_line_feed(tmp_path):
    row = {"model": "base", "group": "a\u2028b"}
    file = tmp_path / "scores.jsonl"
    file.write_text(json.dumps(row, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert _read_rows(file) == [(f"{file}:1", row)]


def test_scores_of_an_official_tool(folder, capsys):
    options = "--data", "data.jsonl", "--weights", "redder", "--count", "1", "--out", "out"
    write_scores()
    evaluate(*options, "--scores", "scores.jsonl")
    results = json.loads(Path("out/results.json").read_text())
    assert [one["value"] for one in results["lines"][0]["scores"]] == [1.75, 2.75]
    assert [one["setting"] for one in results["deviations"]] == ["images per row", "scorer"]
    for change, expected in (
        (lambda rows: rows[:-1], "has no score for 1 of 5 images of redder, the first is row 4"),
        (lambda rows: [{**rows[0], "model": "x"}], "model is 'x'; there are base, redder"),
        (lambda rows: [{**rows[0], "row": 5}], "row 5, copy 0 is no image of this benchmark"),
        (lambda rows: [{**rows[0], "green": None}], "green is None; it must be a finite number"),
        (lambda rows: [*rows, rows[0]], "scores redder and the first model by different rows"),
    ):
        write_scores(change)
        assert expected in refused(capsys, *options, "--scores", "scores.jsonl")
