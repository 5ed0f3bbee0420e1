"""The task of editing models goes behind any policy of edits, and its rewards fit its weights."""

from pathlib import Path

import pytest
import yaml

from flowalign.rewards.composite import Rewards
from flowalign.rewards.config import load_rewards
from flowalign.runs.config.compose import compose

ROOT = Path(__file__).parents[2]
TASK = "configs/tasks/editing.yaml"
POLICIES = tuple(
    f"configs/models/{name}.yaml" for name in ("flux1_dev", "flux1_kontext", "qwen_image_edit")
)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_task_brings_rewards_of_edits_and_leaves_the_policy(policy, tmp_path):
    both, alone = compose([policy, TASK]), compose([policy])
    assert both.values["policy"] == alone.values["policy"]
    assert both.values["recipe"]["init_args"]["on_failed_reward"] == "drop_sample"
    assert both.origins["rewards"] == both.origins["reward_weights.overall"] == TASK
    (tmp_path / "rewards.yaml").write_text(yaml.safe_dump({"rewards": both.values["rewards"]}))
    models, _ = load_rewards(str(tmp_path / "rewards.yaml"))
    assert all("references" in model.spec.needs for model in models)
    own = {dim for dim, origin in _weights(both).items() if origin == TASK}
    Rewards(models, dict.fromkeys(own, 1.0)).check_weights()


def _weights(composed):
    prefix = "reward_weights."
    return {k.removeprefix(prefix): v for k, v in composed.origins.items() if k.startswith(prefix)}
