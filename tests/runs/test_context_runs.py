"""Runs whose processes divide the tokens of a clip among them equal runs that divide nothing."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowalign.runs import load, start, train
from tests.fixtures.ranks import on_ranks
from tests.fixtures.tiny_video import build_wan

slow = pytest.mark.slow
PROMPTS = "assets/shapes/prompts/train.txt"
SAMPLING = {"num_steps": 3, "samples_per_prompt": 3, "micro_batch": 4}
GRPO = {
    "class_path": "flowalign.training.PolicyGradient",
    "init_args": {
        **{"prompts": PROMPTS, "prompts_per_step": 2, "micro_batch": 4},
        "sampling": SAMPLING | {"eta": 0.7},
        "algorithm": {
            "class_path": "flowalign.losses.GRPO",
            "init_args": {
                "surrogate": {"class_path": "flowalign.losses.PPOClip", "init_args": {"clip": 0.2}},
                "kl_coef": 0.1,
            },
        },
    },
}
NFT = {
    "class_path": "flowalign.training.Matching",
    "init_args": {
        "micro_batch": 4,
        "loss": {"class_path": "flowalign.losses.NFT"},
        "updates_per_step": 1,
        "old": {"decay": {"slope": 0.1, "highest": 0.9}, "per": "step"},
        "data": {
            "class_path": "flowalign.training.matching.ScoredGroups",
            "init_args": {
                **{"prompts": PROMPTS, "prompts_per_step": 2, "weights": "old"},
                "sampling": SAMPLING
                | {"sde_window": {"class_path": "flowalign.sampling.NoSteps"}},
            },
        },
    },
}
RECIPES = {"GRPO": GRPO, "NFT": NFT}
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "proj_out", "time_embedder.linear_1"]
"""Layers of blocks, and layers before the tokens are split and where they are gathered."""


def settings(model, recipe, **changes):
    """Three updates of a small adapter of a tiny Wan, with an evaluation before and after."""
    made = {
        **{"path": model, "precision": "fp32", "guidance": 2.0, "max_sequence_length": 24},
        "video": {"height": 32, "width": 48, "num_frames": 9, "fps": 8.0},
        "lora": {"rank": 2, "alpha": 3, "target_modules": TARGETS},
    }
    return {
        "policy": {"class_path": "pipelines.wan.Wan", "init_args": made},
        "rewards": [{"class_path": "reward_models.temporal.TemporalFlicker"}],
        "reward_weights": {"flicker": 1.0},
        "num_steps": 3,
        "recipe": recipe,
        "optimizer": {"learning_rate": 1e-2, "eps": 1e-3, "max_grad_norm": 0.02},
        "evaluation": {"prompts": {"known": PROMPTS}, "num_prompts": 4, "num_steps": 2, "grid": 2},
        "checkpoints": {"every": 2, "verify": "always"},
        "device": "cpu",
        "threads": 1,
    } | changes


def _run(processes, file, resume):
    run, text = load(file)
    train(start(run, text, lambda _: None, resume=resume))


def run(folder, model, name, world, *, resume=None, **changes):
    folder.mkdir(exist_ok=True)
    own = settings(model, RECIPES[name], **changes) | {"output_dir": str(folder / "run")}
    own["recipe"]["init_args"]["on_failed_check"] = "warn"
    (folder / "run.yaml").write_text(yaml.safe_dump(own))
    ranks = folder / f"ranks{world}{resume is None}"
    on_ranks(_run, world, ranks, str(folder / "run.yaml"), resume)
    return folder / "run"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function that returns the folder of a run, and the model that is trained."""
    root = tmp_path_factory.mktemp("context")
    model = build_wan(root / "wan")

    @cache
    def folder(name, world, degree=1):
        sharding = {"sharding": {"context_degree": degree}}
        return run(root / f"{name}{world}{degree}", model, name, world, **sharding)

    return folder, model


def saved(folder, step=3):
    """All tensors of a checkpoint: of training, and the weights that diffusers loads."""
    place = folder / "checkpoints" / f"step-{step:06d}"
    files = sorted(place.rglob("*.safetensors"))
    assert len(files) == 5
    return {f"{f.relative_to(place)}:{n}": t for f in files for n, t in load_file(f).items()}


def rows(folder):
    return [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_equal_runs(ours, theirs, tolerance=1e-6):
    found, expected = saved(ours), saved(theirs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=tolerance, rtol=0, msg=name)
    for our, their in zip(rows(ours), rows(theirs), strict=True):
        assert our.keys() == their.keys()
        for key in ("optim/grad_norm", "eval/flicker", "check/kl_gradient"):
            assert our.get(key) == pytest.approx(their.get(key), rel=1e-3), key
        for key in ("cost/network_evaluations", "cost/reward_calls", "cost/decodes"):
            assert our.get(key) == their.get(key), key


@slow
@pytest.mark.parametrize("name", RECIPES)
def test_two_processes_that_divide_tokens_make_the_updates_of_one(name, made):
    folder, _ = made
    one, divided = folder(name, 1), folder(name, 2, 2)
    final, earlier = saved(one), saved(one, 2)
    trained = [n for n in final if n.startswith("state") and "parameter" in n and "lora_B" in n]
    assert max(float(final[n].abs().max()) for n in trained) > 1e-3, "nothing was trained"
    assert any(not torch.equal(final[n], earlier[n]) for n in trained)
    assert_equal_runs(divided, one)
    assert json.loads((divided / "summary.json").read_text())["processes"] == 2
