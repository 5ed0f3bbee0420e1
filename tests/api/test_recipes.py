"""A script hands over a recipe object, and the run file names it."""

from pathlib import Path

import pytest
import torch

import flowalign
from flowalign.api.objects import describe
from flowalign.runs.config import load
from flowalign.training import PolicyGradient
from flowalign.utils.strict_yaml import parse_yaml, read_yaml
from tests.fixtures.scripts import PROMPTS, SIZE, SMALL, adapter, open_sd3, redness

pytestmark = pytest.mark.slow


def names_equal(described, resolved):
    """Compare settings; a class has several paths."""
    if isinstance(described, dict):
        assert described.keys() - {"init_args"} == resolved.keys() - {"init_args"}
        for name, inner in described.items():
            names_equal(inner, resolved.get(name, {}))
    elif isinstance(described, list):
        for pair in zip(described, resolved, strict=True):
            names_equal(*pair)
    elif isinstance(described, str) and "." in described:
        assert described.rpartition(".")[2] == resolved.rpartition(".")[2]
    else:
        assert described == resolved


@pytest.mark.parametrize("name", ["shapes_nft", "shapes_draft", "shapes_levels", "shapes_tdm"])
def test_a_recipe_is_described_as_its_run_file_has_it(name):
    run, text = load(f"configs/{name}.yaml")
    names_equal(describe(run.recipe), parse_yaml(text)["recipe"])


def test_a_published_reward_is_described_by_the_arguments_that_it_got():
    described = describe(flowalign.rewards.JpegSize(quality=90))
    assert described["init_args"] == {"dim": "compressibility", "quality": 90}
    assert described["class_path"] == "reward_models.signals.jpeg.JpegSize"
    assert describe(flowalign.rewards.PickScore(device="cpu"))["init_args"]["device"] == "cpu"
    assert describe(flowalign.rewards.SubjectFocus())["class_path"].endswith(".SubjectFocus")


def test_a_recipe_object_trains_like_the_file_that_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    recipe = PolicyGradient(
        prompts="prompts.txt",
        sampling=flowalign.sampling.Sampling(num_steps=3, samples_per_prompt=2),
        credit=flowalign.credit.NextValue(),
        prompts_per_step=2,
    )
    settings = {"num_steps": 2, "settings": SMALL["settings"], "micro_batch": 4, **SIZE}
    first = flowalign.align(open_sd3(tmp_path), redness, method=recipe, **settings)
    assert str(first.output_dir) == "runs/PolicyGradient"
    file = str((first.output_dir / "config.yaml").absolute())
    assert "python:" not in str(read_yaml(Path(file))["recipe"])
    assert read_yaml(Path(file))["recipe"]["init_args"]["prompts"] == "prompts.txt"
    again = load(file, [f"--policy.path={tmp_path / 'model'}"])[0].recipe
    assert again == recipe.__class__(
        **vars(recipe) | {"sampling": again.sampling, "micro_batch": 4}
    )
    # The argument `prompts` replaces those of the recipe.
    second = flowalign.align(
        open_sd3(tmp_path / "other"), redness, PROMPTS, method=again, **settings, output_dir="b"
    )
    for name, tensor in adapter(first.pipe).items():
        assert torch.equal(tensor, adapter(second.pipe)[name]), name


def test_a_component_without_a_name_is_refused(tmp_path):
    class Own(flowalign.credit.Outcome):
        pass

    sampling = flowalign.sampling.Sampling(num_steps=3, samples_per_prompt=2)
    recipe = PolicyGradient(prompts="x", sampling=sampling, credit=Own())
    with pytest.raises(ValueError, match="has no name in a run file"):
        flowalign.Trainer(open_sd3(tmp_path), redness, PROMPTS, method=recipe)
