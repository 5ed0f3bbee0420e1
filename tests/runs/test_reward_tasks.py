"""Run files of rewards and their combinations: dimensions fit weights."""

from pathlib import Path

import pytest

from flowalign.losses import DPO
from flowalign.rewards import LogSigmoidCentred
from flowalign.runs.config.loading import compose
from tests.fixtures.scored import weighted_rewards

ROOT = Path(__file__).parents[2]
TASKS = {
    "configs/tasks/mj_video.yaml": ("wan21_1_3b", {"overall": 1.0, "motion": 0.1}),
    "configs/tasks/ixc_reward.yaml": ("sd35_medium", {"ixc_reward": 1.0}),
    "configs/methods/lsc.yaml": ("sd35_medium", {"pickscore": 1.0, "image_reward": 1.0}),
    "configs/tasks/one_reward.yaml": (
        "flux1_fill",
        dict.fromkeys(("text_alignment", "consistency", "structure", "aesthetics"), 0.25),
    ),
}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_weighs_its_own_rewards_and_leaves_the_policy(task):
    model, wanted = TASKS[task]
    both, alone = (
        compose([f"configs/models/{model}.yaml", task]),
        compose([f"configs/models/{model}.yaml"]),
    )
    assert both.values["policy"] == alone.values["policy"]
    rewards = weighted_rewards(both.values["rewards"])
    assert rewards.weight_of == wanted
    rewards.check_weights()
    if task.endswith("lsc.yaml"):
        settings = both.values["recipe"]["init_args"]["advantages"]["value_transform"]
        LogSigmoidCentred(**settings).check(rewards)
        assert settings["reference_columns"].keys() == wanted.keys()


def test_modpo_is_about_one_dimension_and_explained_by_another():
    values = compose(["configs/preference/shapes/modpo.yaml"]).values
    settings = values["recipe"]["init_args"]["loss"]["init_args"]
    loss = DPO(**settings)
    assert (loss.margin, loss.margin_weight) == ({"clean": 0.5}, 0.5)
