"""A group of settings is a mapping; a number, a list or null in its place is refused by name."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from flowalign.rewards.config import load_rewards
from flowalign.runs.config import load
from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec
from flowalign.utils.errors import ConfigError
from tests.fixtures.run_files import complaint, write_changed

SHAPES = "configs/shapes.yaml"
RECIPE = "recipe.init_args"
GROUPS = [
    f"{RECIPE}.sampling",
    f"{RECIPE}.sampling.states",
    f"{RECIPE}.completion",
    "optimizer",
    "checkpoints",
]
"""Groups with their own defaults; groups that may be null follow."""
NULLABLE = ["ema", "evaluation", "policy.init_args.lora", f"{RECIPE}.calibration"]


def written(folder, key: str, value: object) -> str:
    """The run file of the toy model with another value for a key."""
    return write_changed(SHAPES, folder, {key.replace(".", "/"): value})


CASES = [(key, value) for key in GROUPS for value in (3, [1, 2], None, True, "three")]
CASES += [(key, value) for key in NULLABLE for value in (3, [1, 2])]


@pytest.mark.parametrize(("key", "value"), CASES, ids=str)
def test_a_run_file_names_the_group_and_the_value(tmp_path, key, value):
    message = complaint(written(tmp_path, key, value))
    shown = "null" if value is None else str(value)
    expected = f"{key.replace('.init_args', '')} is {shown}; it must be a mapping of settings"
    assert f"run.yaml: {expected}" in message


@pytest.mark.parametrize("value", [3, [1, 2], None])
@pytest.mark.parametrize("component", ["recipe", "policy", f"{RECIPE}.algorithm"])
def test_arguments_of_a_component_are_a_mapping(tmp_path, component, value):
    message = complaint(written(tmp_path, f"{component}.init_args", value))
    where = component.replace(".init_args", "")
    shown = f"init_args is of type {type(value).__name__}; it must be a mapping of settings"
    assert f"run.yaml: {where}: {shown}" in message


@pytest.mark.parametrize("value", ["3", "[1,2]", "null", "three"])
@pytest.mark.parametrize("key", ["recipe.sampling", "recipe.sampling.states", "optimizer"])
def test_an_override_names_the_group_and_the_value(key, value):
    shown = "[1, 2]" if value.startswith("[") else value
    expected = f"{key} is {shown}; it must be a mapping of settings"
    assert expected.replace(" ", "") in complaint(SHAPES, f"{key}={value}").replace(" ", "")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["--recipe.sampling.tail_ratio", "null"], "sampling.tail_ratio"),
        (["recipe.sampling.tail_ratio=0.5", "recipe.sampling.tail_ratio=~"], "sampling.tail_ratio"),
        (["recipe.critic={}", "recipe.critic=null"], "critic"),
    ],
)
def test_null_reaches_settings_inside_components_that_may_be_null(overrides, key):
    value = load(str(SHAPES), overrides)[0].recipe
    for name in key.split("."):
        value = getattr(value, name)
    assert value is None


def test_what_is_set_after_a_null_counts():
    recipe = load(
        str(SHAPES), ["recipe.rollout_batch_prompts=null", "recipe.rollout_batch_prompts=2"]
    )
    assert recipe[0].recipe.rollout_batch_prompts == 2


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("recipe.step_weight", "uniform or .*dt.*MeasuredWeight"),
        ("recipe.micro_batch", "at least 1"),
        ("recipe.credit", "CreditEstimator"),
        ("recipe.prompts", "a text"),
        ("seed", "at least 0"),
        ("rewards", "a list"),
    ],
)
def test_null_is_refused_by_name_for_other_settings(key, allowed):
    with pytest.raises(ConfigError, match=rf"^command line: {key} is null; it must be {allowed}"):
        load(str(SHAPES), [f"--{key}", "null"])


def test_null_for_a_setting_that_is_unknown_names_the_one_that_was_meant():
    assert "sampling.tail_ratio?" in complaint(SHAPES, "recipe.sampling.tail_rato=null")


def test_the_settings_of_a_group_are_listed(tmp_path):
    assert complaint(written(tmp_path, "checkpoints", 3)).endswith("settings: every, keep, verify")


@pytest.mark.parametrize(
    ("key", "value"), [(f"{RECIPE}.sampling.states", {}), *((key, None) for key in NULLABLE)]
)
def test_mappings_and_null_where_it_is_allowed_are_taken(tmp_path, key, value):
    assert load(str(written(tmp_path, key, value)))[0]


@dataclass(frozen=True)
class Settings:
    """A group with a default."""

    side: int = 8


class Grouped(RewardModel):
    """A reward with a group of settings."""

    def __init__(self, settings: Settings = Settings()):
        self.spec = RewardSpec("side", ("side",), "any", (0.0, 1.0), "none")

    def score(self, batch: MediaBatch) -> RewardOutput:
        raise AssertionError("settings are checked before anything is scored")


def test_a_group_of_a_reward_in_a_list_is_checked_too(tmp_path):
    grouped = {"class_path": f"{__name__}.Grouped", "init_args": {"settings": [3]}}
    rewards = [{"class_path": "reward_models.JpegSize"}, grouped]
    expected = "is [3]; it must be a mapping of settings: side"
    assert f"rewards.1.settings {expected}" in complaint(written(tmp_path, "rewards", rewards))
    file = tmp_path / "rewards.yaml"
    file.write_text(yaml.safe_dump({"rewards": rewards}))
    with pytest.raises(ConfigError) as caught:
        load_rewards(str(file))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "option"),
    [
        (["--recipe.sampling.num_steps"], "--recipe.sampling.num_steps"),
        (["--recipe.sampling.num_steps", "--seed", "3"], "--recipe.sampling.num_steps"),
        (["--seed", "3", "--policy.lora.rank"], "--policy.lora.rank"),
        (["--recipe.sampling.eta", "-1", "--seed"], "--seed"),
    ],
)
def test_an_option_without_a_value_is_named_in_full(overrides, option):
    assert f"argument {option}: expected one argument" in complaint(SHAPES, *overrides)


# Every list of rewards under configs/rewards is understood, without weights, hub or server --------


LISTS = sorted(Path("configs/rewards").glob("*.yaml"))


@pytest.mark.parametrize("path", LISTS, ids=lambda p: p.stem)
def test_a_list_of_rewards_names_distinct_dimensions_and_licences(path):
    models, resolved = load_rewards(str(path))
    dims = [dim for model in models for dim in model.spec.dims]
    assert len(set(dims)) == len(dims) >= 1
    assert all(model.spec.licence for model in models)
    assert len({model.spec.fingerprint() for model in models}) == len(models)
    again, _ = load_rewards_from(resolved)
    assert [m.spec for m in again] == [m.spec for m in models]


@pytest.mark.parametrize("name", ["sd35_latent", "wan21_1_3b_latent"])
def test_the_pairs_of_a_latent_reward_have_scores_in_all_its_dimensions(name):
    """`flowalign pairs` writes only the scores of dimensions with a weight."""
    text = Path(f"configs/reward/{name}.yaml").read_text()
    command = re.search(r"flowalign pairs .* --weights ((?:\S+=\S+ )+)", text)
    assert command is not None
    weighted = {weight.partition("=")[0] for weight in command[1].split()}
    assert weighted == yaml.safe_load(text)["dimensions"].keys()


def load_rewards_from(text):
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return load_rewards(file.name)
