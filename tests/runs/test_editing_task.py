"""The task of editing models goes behind any policy of edits, and its rewards fit its weights."""

from pathlib import Path

import pytest

from flowalign.runs.config.loading import compose
from tests.fixtures.scored import weighted_rewards

ROOT = Path(__file__).parents[2]
TASK = "configs/tasks/editing.yaml"
POLICIES = tuple(
    f"configs/models/{name}.yaml" for name in ("flux1_dev", "flux1_kontext", "qwen_image_edit")
)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_task_brings_rewards_of_edits_and_leaves_the_policy(policy):
    both, alone = compose([policy, TASK]), compose([policy])
    assert both.values["policy"] == alone.values["policy"]
    assert both.values["recipe"]["init_args"]["on_failed_reward"] == "drop_sample"
    assert both.origins["rewards"] == TASK
    rewards = weighted_rewards(both.values["rewards"])
    assert all("references" in model.spec.needs for model in rewards.models)
    rewards.check_weights()
