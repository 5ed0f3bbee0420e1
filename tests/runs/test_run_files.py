"""The composed run files hold what the complete ones of version 0.1 held.

`old_run_files.json` says for each old file which files are given in its place. Where that is a
list, the run is named after these files: only there `output_dir` differs.
"""

import json
import re
from pathlib import Path

import pytest

from flowalign.runs.compose import compose, read_mapping
from flowalign.runs.convert import converted

ROOT = Path(__file__).parents[2]
OLD = json.loads((ROOT / "assets/golden/run_files_0.1.json").read_text())
SUCCESSORS = json.loads((ROOT / "tests/runs/old_run_files.json").read_text())
OLD_LINES = 4932
"""The lines below configs/ when every run file was complete."""

SINCE = ("flux1_kontext", "flux1_fill", "qwen_image", "qwen_image_edit")
"""The models that came after version 0.1."""

MODELS = ("shapes", "sd35_medium", "flux1_dev")
METHODS = sorted({Path(old).stem for old in OLD if old.startswith("configs/credit/")})


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def run_files() -> list[str]:
    """Return the files of training runs and their parts; other commands have files of theirs."""
    others = ("configs/rewards/", "configs/reward/", "configs/clip_pairs/")
    files = [file.relative_to(ROOT).as_posix() for file in (ROOT / "configs").rglob("*.yaml")]
    return sorted(file for file in files if not file.startswith(others))


def extended(file: str) -> list[str]:
    named = read_mapping(file).get("extends", [])
    return [named] if isinstance(named, str) else named


def header(file: str) -> list[str]:
    return [line for line in Path(file).read_text().splitlines() if line.startswith("#")]


def letters(lines: list[str]) -> set[str]:
    """Return the letters that mark a value as borrowed, such as (F)."""
    return set(re.findall(r"\(([A-Z])\)", "\n".join(lines)))


def test_every_old_run_file_has_a_successor():
    assert SUCCESSORS.keys() == OLD.keys()
    assert len(OLD) == 94
    assert all(isinstance(files, list) and files for files in SUCCESSORS.values())


@pytest.mark.parametrize("old", OLD)
def test_composed_values_equal_those_of_the_old_run_file(old):
    now, before = compose(SUCCESSORS[old]).values, converted(OLD[old])
    if len(SUCCESSORS[old]) > 1:
        names = "-".join(Path(file).stem for file in SUCCESSORS[old])
        assert now.pop("output_dir") == f"runs/{names}"
        del before["output_dir"]
    assert now == before


@pytest.mark.parametrize("method", [m for m in METHODS if m != "flow_grpo_all_steps"])
@pytest.mark.parametrize("model", MODELS)
def test_every_method_composes_with_every_model(model, method):
    files = [f"configs/models/{model}.yaml", f"configs/methods/{method}.yaml"]
    pair = compose(files)
    assert pair.values["output_dir"] == f"runs/{model}-{method}"
    assert pair.origins["recipe.init_args.credit.class_path"] == files[1]
    assert pair.origins["policy.class_path"] == files[0]


def test_models_that_methods_go_behind_are_complete():
    wanted = {"policy", "rewards", "reward_weights", "num_steps", "recipe", "evaluation"}
    for file in sorted((ROOT / "configs/models").glob("*.yaml")):
        values = compose([str(file)]).values
        assert wanted <= values.keys()
        assert "prompts" in values["recipe"]["init_args"]


def test_no_run_file_is_left_over():
    given = {file for files in SUCCESSORS.values() for file in files}
    given |= {f"configs/models/{model}.yaml" for model in SINCE}
    used = given | {origin for file in given for origin in compose([file]).origins.values()}
    assert [file for file in run_files() if file not in used] == []


def test_no_pair_file_repeats_what_the_pair_says_anyway():
    for file in run_files():
        if file.startswith("configs/credit/"):
            own = [k for k, origin in compose([file]).origins.items() if origin == file]
            assert len(own) > 1, f"{file} sets {own} only: give its two files instead"


def test_run_files_take_less_than_half_of_the_lines_they_took():
    lines = sum(len(f.read_text().splitlines()) for f in (ROOT / "configs").rglob("*.yaml"))
    assert lines < OLD_LINES / 2


def test_letters_beside_values_are_explained_in_a_file_they_come_from():
    for file in run_files():
        lines = Path(file).read_text().splitlines()
        headers = [line for name in (file, *extended(file)) for line in header(name)]
        unknown = letters(lines) - letters(headers)
        assert not unknown, f"{file}: no header says what {sorted(unknown)} is"


def test_files_of_published_models_say_that_nothing_was_run():
    for folder in ("credit/sd35_medium", "credit/flux1_dev"):
        for file in sorted((ROOT / "configs" / folder).glob("*.yaml")):
            assert "nothing here was run on the real model" in file.read_text()
    for model in SINCE:
        file = ROOT / f"configs/models/{model}.yaml"
        assert "nothing here was run on the real model" in file.read_text()


def test_every_method_names_its_source():
    for method in METHODS:
        file = ROOT / f"configs/methods/{method}.yaml"
        if method != "flow_grpo_all_steps":
            assert re.search(r"# Source: .*(arXiv:\d{4}\.\d{5}|ours)", "\n".join(header(str(file))))
