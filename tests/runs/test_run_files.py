"""Run files compose, name their sources, and say what they train."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flowalign.functional.noise_matching import step_at
from flowalign.runs.config.loading import compose
from flowalign.runs.planning import plan
from flowalign.utils.strict_yaml import read_mapping
from tests.fixtures.run_files import CONFIGS, METHODS, loaded

ROOT = Path(__file__).parents[2]
DEFAULTS = {"updates_per_step": 1, "epochs_per_step": 1}
"""Meaning of a missing key in a file."""

MODELS = ("toy_shapes", "sd35_medium", "flux1_dev")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def run_files() -> list[str]:
    """Return the files of training runs and their parts, without files of other commands."""
    names = ("rewards", "reward", "clip_pairs", "search", "benchmarks")
    others = tuple(f"configs/{name}/" for name in names)
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


def settings(values: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """Return the values by dotted key, without the names of components' parts."""
    flat = dict(DEFAULTS) if not inside else {}
    for name, value in values.items():
        key = inside if name == "init_args" else f"{inside}.{name}".removeprefix("recipe.")
        key = key.removeprefix(".")
        flat |= settings(value, key or "recipe") if isinstance(value, Mapping) else {key: value}
    return flat


@pytest.mark.parametrize("model", MODELS)
def test_every_method_composes_with_every_model(model):
    for method in METHODS:
        files = [f"configs/models/{model}.yaml", f"configs/methods/{method}.yaml"]
        pair = compose(files)
        assert pair.values["output_dir"] == f"runs/{model}-{method}"
        assert pair.origins["recipe.init_args.credit.class_path"] == files[1], method
        assert pair.origins["policy.class_path"] == files[0], method


def test_a_method_with_rewards_of_its_own_drops_the_thresholds_of_the_model():
    extended = ROOT / "configs/methods/flow_grpo_wan21.yaml"
    for file in sorted({*(ROOT / "configs/methods").glob("*.yaml")} - {extended}):
        values = compose(["configs/models/wan21_1_3b.yaml", str(file)]).values
        weights = [entry.get("weight") for entry in values["rewards"]]
        named = {dim for one in weights if isinstance(one, dict) for dim in one}
        advantages = values["recipe"]["init_args"].get("advantages") or {}
        bounds = advantages.get("thresholds") or {"at": {}}
        assert bounds["at"].keys() <= named, file


def test_models_that_methods_go_behind_are_complete():
    wanted = {"policy", "rewards", "num_steps", "recipe", "evaluation"}
    for file in sorted((ROOT / "configs/models").glob("*.yaml")):
        values = compose([str(file)]).values
        assert wanted <= values.keys()
        assert "prompts" in values["recipe"]["init_args"]


def test_no_pair_file_repeats_what_the_pair_says_anyway():
    for file in run_files():
        if file.startswith("configs/credit/"):
            own = [k for k, origin in compose([file]).origins.items() if origin == file]
            assert len(own) > 1, f"{file} sets {own} only: give its two files instead"


def test_letters_beside_values_are_explained_in_a_file_they_come_from():
    for file in run_files():
        lines = Path(file).read_text().splitlines()
        headers = [line for name in (file, *extended(file)) for line in header(name)]
        unknown = letters(lines) - letters(headers)
        assert not unknown, f"{file}: no header says what {sorted(unknown)} is"


def test_files_of_published_models_have_no_label_of_a_run():
    """The label of the first line is the only note that no GPU ran the file."""
    folders = "credit/sd35_medium", "credit/flux1_dev", "credit/sd15", "reward_gradient"
    files = [file for one in folders for file in (ROOT / "configs" / one).glob("*.yaml")]
    assert len(files) > 20
    for file in files:
        assert file.read_text().startswith(("# [checked only] ", "# [step tested] ")), file


def test_every_method_names_its_source():
    for method in METHODS:
        file = ROOT / f"configs/methods/{method}.yaml"
        assert re.search(
            r"# Source: .*(arXiv:\d{4}\.\d{5}|our design)", "\n".join(header(str(file)))
        )


def test_embedded_runs_of_one_update_per_rollout_say_so():
    """No clip acts there, which nobody should take for the published method."""
    for file in run_files():
        if file.startswith("configs/credit/toy_shapes/"):
            updates = settings(compose([file]).values)
            once = updates["updates_per_step"] * updates["epochs_per_step"] == 1
            assert once == ("one update per rollout" in " ".join(header(file))), file


@pytest.mark.parametrize("file", sorted((ROOT / "configs/models").glob("*.yaml")))
def test_model_files_of_one_update_per_rollout_say_so(file):
    updates = settings(compose([str(file)]).values)
    once = updates["updates_per_step"] * updates["epochs_per_step"] == 1
    assert once == ("one update" in " ".join(header(str(file)))), file


@pytest.mark.slow
def test_step_credit_of_nft_costs_what_its_file_says():
    """Per prompt 1 + 5 + 9 + 3 x 12 distinct states; four levels of each of the three steps."""
    run, _ = loaded(CONFIGS / "shapes_nft.yaml", CONFIGS / "tasks/shapes_step_credit.yaml")
    rows, sigmas = plan(run), run.policy.plan().sigmas
    counted = f"at most {16 * 51} sampling + 2304 training"
    assert rows["network evaluations per step"].startswith(counted)
    assert rows["reward calls per step"] == "192"
    assert rows["noise levels with credit"].endswith("a sample has those of 1 of these steps")
    assert step_at(sigmas(29)[:12], sigmas(8)).bincount().tolist() == [4, 4, 4]
    assert 16 * 51 + 16 * 12 * 4 * 2 == 2352
