"""Sound and first frames are trained by every kind of method, on tiny random models."""

import json
from typing import Any

import pytest
import yaml

from flowalign.cli.main import main
from flowalign.runs.config.loading import compose
from tests.fixtures.run_files import CONFIGS
from tests.fixtures.tiny_ltx2 import build_ltx2
from tests.fixtures.tiny_video import build_wan22_5b

pytestmark = pytest.mark.slow
MODELS = {
    "ltx2": (build_ltx2, {"height": 32, "width": 64, "num_frames": 5, "fps": 12.0}),
    "wan22_5b_i2v": (build_wan22_5b, {"height": 32, "width": 64, "num_frames": 9, "fps": 8.0}),
}
METHODS = {
    "flow_grpo_wan21": {"prompts_per_step": 2, "rollout_batch_prompts": 2, "updates_per_step": 1},
    "worldcompass_wan": {"prompts_per_step": 2},
    "online_dpo_video": {"prompts_per_step": 2, "samples_per_prompt": 2, "num_steps": 3},
}


def small(name: str, method: str, folder: str) -> dict[str, Any]:
    """A model's run file with a method's, with a tiny model, few samples and a reward by rule."""
    behind = [] if name == "ltx2" or method == "flow_grpo_wan21" else ["tasks/first_frames"]
    files = [f"models/{name}", f"methods/{method}", *behind]
    files = files if method != "flow_grpo_wan21" else files[:1]
    values = compose([str(CONFIGS / f"{file}.yaml") for file in files]).values
    changes = {"path": folder, "video": MODELS[name][1], "precision": "fp32", "memory": {}}
    values["policy"]["init_args"] |= changes | {"max_sequence_length": 24}
    values["policy"]["init_args"]["lora"]["rank"] = 2
    # gradients of tiny networks may be below Adam's eps until its second factor has moved
    values.setdefault("optimizer", {})["learning_rate"] = 1e-2
    recipe = values["recipe"]["init_args"]
    source = recipe["data"]["init_args"] if "data" in recipe else recipe
    source |= METHODS[method]
    for name in ("thresholds", "extremes"):
        source.get("advantages", {}).pop(name, None)
    if "sampling" in source:
        source["sampling"] |= {"num_steps": 3, "samples_per_prompt": 3}
    if method == "worldcompass_wan":
        recipe["times"]["init_args"]["num_steps"] = 4
        recipe["times_per_sample"] = 2
    weights = {"rewards": [{"class_path": "reward_models.TemporalFlicker", "weight": 1.0}]}
    plain = {"num_steps": 2, "evaluation": None, "trackers": [], "device": "cpu", "threads": 1}
    return values | weights | plain


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_two_steps_move_the_adapter(tmp_path, name, method):
    folder = MODELS[name][0](tmp_path / "model")
    content = small(name, method, folder) | {"output_dir": str(tmp_path / "run")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit) as stop:
        main(["train", str(tmp_path / "run.yaml")])
    assert stop.value.code == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 2
    assert all(row["optim/grad_norm"] > 0 for row in rows)
