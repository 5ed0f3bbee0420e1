"""Every run file states its results; `flowalign recipes` lists and copies run files."""

import csv
import re
from pathlib import Path
from typing import get_args

import pytest

from flowalign.runs.combinations import combination, combinations
from flowalign.runs.run_files import Label, read_recipe, recipes
from tests.fixtures.commands import exit_code
from tests.fixtures.run_files import keep_methods, shipped

RUN_FILES = sorted(
    file
    for file in Path("configs").rglob("*.yaml")
    if file.parts[1] not in ("rewards", "benchmarks")
)


def told(capsys, *words: str) -> tuple[object, str, str]:
    code, said = exit_code("recipes", *words), capsys.readouterr()
    return code, said.out, said.err


def test_every_run_file_has_a_label_and_says_what_it_is():
    for file in RUN_FILES:
        recipe = shipped()[file.relative_to("configs").with_suffix("").as_posix()]
        assert recipe.label in get_args(Label), file
        assert len(recipe.about) > 10, file
        assert not recipe.about.startswith("["), file
        assert file.read_text().count(f"[{recipe.label}]") == 1, file


def test_nothing_that_needs_a_gpu_is_said_to_have_run():
    """No published weights ran on a GPU; whoever runs some changes labels and README."""
    ran = [one for one in recipes() if one.label.startswith("run on")]
    assert {one.label for one in ran} == {"run on CPU"}
    assert not [one.name for one in ran if re.search("on GPUs|sd35|flux1|wan2|qwen", one.name)]
    assert [one.name for one in ran if "on GPUs" in one.files[0].read_text()] == []
    assert "No row has trained with published weights yet" in Path("README.md").read_text()


def test_methods_and_models_that_trained_in_the_matrix_are_labelled_so():
    """`python -m tests.matrix.run --table assets/matrix.csv` writes table and labels."""
    with Path("assets/matrix.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    columns = zip(*(row[1:] for row in rows), strict=True)
    states = {f"models/{a}": set(one) for a, one in zip(header[1:], columns, strict=True)}
    states |= {f"methods/{row[0]}": set(row[1:]) for row in rows}
    labels = {name: shipped()[name].label for name in states}
    expected = {
        name: "step tested" if "trained" in found else "checked only"
        for name, found in states.items()
        if not labels[name].startswith("run on")
    }
    assert {name: labels[name] for name in expected} == expected
    assert {*expected.values()} == {"step tested", "checked only"}


@pytest.mark.parametrize("line", ["# A run.", "# [run on TPU] A run.", "policy: 1"])
def test_a_first_line_without_a_label_is_refused(tmp_path, line):
    (tmp_path / "run.yaml").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=r"run.yaml: the first line must begin with one of \[run"):
        read_recipe("run", tmp_path / "run.yaml")


def test_the_list_has_label_source_and_what_it_is(capsys):
    code, out, _ = told(capsys, "shapes")
    assert code == 0
    lines = out.splitlines()
    first = " ".join(lines[0].split())
    assert first.startswith("shapes [run on CPU] Flow-GRPO (arXiv:2505.05470) on Shapes, the ")
    assert "shapes_edit " in out
    assert "arXiv:2508.04324" in out
    assert shipped()["credit/toy_shapes/mixgrpo"].papers[0] == "2507.21802v7"
    assert len(lines) == int(lines[-1].split()[0]) + 1  # a line per file


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("wan", "models/wan22_5b"),
        ("wan21", "models/wan21_1_3b"),
        ("grpo", "methods/flow_grpo"),
        ("DPO", "methods/step_dpo"),
        ("sd3.5", "models/sd35_medium"),
        ("2507.21802", "methods/mixgrpo"),
        ("DiffusionNFT", "methods/nft"),
    ],
)
def test_a_word_finds_files_by_name_model_method_and_paper(capsys, word, found):
    code, out, _ = told(capsys, word)
    assert code == 0
    assert found in {line.split()[0] for line in out.splitlines()}


def test_a_copy_is_the_file_with_its_comments_and_replaces_nothing(capsys, tmp_path):
    out = tmp_path / "mine" / "run.yaml"
    code, _, said = told(capsys, "credit/toy_shapes/mixgrpo", "--out", str(out))
    assert code == 0
    assert f"flowalign check {out}" in said
    assert out.read_text() == Path("configs/credit/toy_shapes/mixgrpo.yaml").read_text()
    code, _, said = told(capsys, "credit/toy_shapes/mixgrpo", "--out", str(out))
    assert code == 2
    assert "exists and is not overwritten" in said


def test_an_unknown_name_is_refused_with_those_that_are_near(capsys):
    code, _, said = told(capsys, "mixgrpo", "--out", "x.yaml")
    assert code == 2
    assert "no run file 'mixgrpo'" in said
    assert "credit/toy_shapes/mixgrpo" in " ".join(said.split())
    assert len(said.splitlines()) <= 5


@pytest.mark.slow
def test_methods_behind_a_model_are_those_that_are_valid_runs_there(monkeypatch):
    """Methods ask for guidance abstractly, so a network with guidance as an input takes them."""
    both = "flow_grpo", "dense_grpo", "step_dpo", "flow_dpo", "mixgrpo", "nft_distilled"
    keep_methods(monkeypatch, *both, "nft", "awm", "refl", "cpo", "vader")
    found = {one.name: one for one in combinations(shipped()["models/flux2_dev"])}
    behind = {name.partition(" methods/")[2] for name in found} - {""}
    assert {*both} <= behind
    assert {"nft", "awm", "refl"} <= behind
    assert behind.isdisjoint({"cpo", "vader"})  # data that are absent, videos
    dense = found["models/flux2_dev methods/dense_grpo"]
    assert (dense.label, dense.papers[0]) == ("step tested", "2601.20218v2")
    assert "2505.05470v5" in dense.papers
    assert dense.about == shipped()["methods/dense_grpo"].about


@pytest.mark.slow
def test_a_method_with_prompts_of_its_own_gets_those_that_the_model_s_file_trains_on():
    edits = combination(shipped()["models/flux1_kontext"], "nft_distilled", shipped())
    assert edits is not None
    assert edits.name == "models/flux1_kontext methods/nft_distilled tasks/edits"
    assert edits.about == shipped()["methods/nft_distilled"].about
    frames = combination(shipped()["models/ltx_video_i2v"], "nft", shipped())
    assert frames is not None
    assert frames.name == "models/ltx_video_i2v methods/nft tasks/first_frames"
    plain = combination(shipped()["models/flux1_dev"], "nft_distilled", shipped())
    assert plain is not None
    assert plain.name == "models/flux1_dev methods/nft_distilled"
    distilled = combination(shipped()["models/flux1_dev"], "nft", shipped())
    assert distilled is not None
    assert distilled.name == "models/flux1_dev methods/nft"


@pytest.mark.slow
def test_the_methods_of_a_model_are_listed_as_commands_have_them(capsys, monkeypatch):
    keep_methods(monkeypatch, "dense_grpo", "mixgrpo")
    code, out, _ = told(capsys, "models/toy_shapes", "--methods")
    assert code == 0
    text = " ".join(out.replace("│", " ").split())
    assert "models/toy_shapes methods/dense_grpo [run on CPU] DenseGRPO" in text
    assert "credit/toy_shapes/mixgrpo [run on CPU] MixGRPO" in text


@pytest.mark.parametrize("words", [("shapes", "--methods"), ("--methods",)])
def test_methods_are_asked_of_a_model(capsys, words):
    code, _, said = told(capsys, *words)
    assert code == 2
    assert re.search("is no model|there is no run file", said)
