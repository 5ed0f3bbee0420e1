"""Runs with processes that divide the tokens of a clip equal runs without division."""

import json
from functools import cache

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowalign.runs import load, start, train
from flowalign.runs.planning import plan
from flowalign.training.recipe import Recipe
from tests.fixtures.ranks import on_ranks
from tests.fixtures.tiny_video import build_wan

slow = pytest.mark.slow
PROMPTS = "assets/shapes/prompts/train.txt"
SAMPLING = {"num_steps": 3, "samples_per_prompt": 3, "micro_batch": 8}
GRPO = {
    "class_path": "flowalign.training.PolicyGradient",
    "init_args": {
        **{"prompts": PROMPTS, "prompts_per_step": 2, "micro_batch": 8},
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
        "micro_batch": 8,
        "loss": {"class_path": "flowalign.losses.NFT"},
        "updates_per_step": 1,
        "old": {"decay": {"slope": 0.1, "highest": 0.9}, "per": "step"},
        "data": {
            "class_path": "flowalign.training.matching.ScoredGroups",
            "init_args": {
                **{"prompts": PROMPTS, "prompts_per_step": 2, "weights": "old"},
                "sampling": SAMPLING | {"sde_window": {"class_path": "flowalign.sampling.NoSteps"}},
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
        **{"path": model, "precision": "fp32", "guidance": 1.0, "max_sequence_length": 24},
        "video": {"height": 32, "width": 48, "num_frames": 5, "fps": 8.0},
        "lora": {"rank": 2, "alpha": 3, "target_modules": TARGETS},
    }
    return {
        "policy": {"class_path": "pipelines.Wan", "init_args": made},
        "rewards": [{"class_path": "reward_models.TemporalFlicker", "weight": 1.0}],
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
    """The run directory of a run on `world` processes."""
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
    def folder(name, degree):
        sharding = {"sharding": {"context_degree": degree}}
        return run(root / f"{name}{degree}", model, name, degree, **sharding)

    return folder, model


def saved(folder, step=3):
    """All tensors of a checkpoint: of training, and the weights that diffusers loads."""
    place = folder / "checkpoints" / f"step-{step:06d}"
    files = sorted(place.rglob("*.safetensors"))
    assert len(files) == 5
    return {f"{f.relative_to(place)}:{n}": t for f in files for n, t in load_file(f).items()}


def rows(folder):
    return [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_equal(ours, theirs, tolerance=1e-6):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=tolerance, rtol=0, msg=name)


def assert_equal_runs(ours, theirs):
    assert_equal(saved(ours), saved(theirs))
    for our, their in zip(rows(ours), rows(theirs), strict=True):
        assert our.keys() == their.keys()
        for key in {"optim/grad_norm", "eval/flicker", "check/kl_gradient"} & their.keys():
            assert our[key] == pytest.approx(their[key], rel=1e-3), key
        for key in {"cost/network_evaluations", "cost/reward_calls", "cost/decodes"} & their.keys():
            assert our[key] == their[key], key


@slow
@pytest.mark.parametrize("name", RECIPES)
def test_two_processes_that_divide_tokens_make_the_updates_of_one(name, made):
    folder, _ = made
    one, divided = folder(name, 1), folder(name, 2)
    final, earlier = saved(one), saved(one, 2)
    trained = [n for n in final if n.startswith("state") and "parameter" in n and "lora_B" in n]
    assert max(float(final[n].abs().max()) for n in trained) > 1e-3, "nothing was trained"
    assert any(not torch.equal(final[n], earlier[n]) for n in trained)
    assert_equal_runs(divided, one)
    assert json.loads((divided / "summary.json").read_text())["processes"] == 2


@slow
@pytest.mark.parametrize(("before", "degree"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_tokens_divided_or_whole_again(tmp_path, made, before, degree):
    folder, model = made
    resume = folder("GRPO", before) / "checkpoints/step-000002"
    sharding = {"context_degree": degree}
    resumed = run(tmp_path / "on", model, "GRPO", degree, resume=resume, sharding=sharding)
    assert_equal(saved(resumed), saved(folder("GRPO", 1)))


@slow
def test_four_processes_in_two_groups_make_the_updates_of_one(tmp_path, made):
    folder, model = made
    changes = {"num_steps": 2, "evaluation": None, "sharding": {"context_degree": 2}}
    four = run(tmp_path / "four", model, "GRPO", 4, **changes)
    assert_equal(saved(four, 2), saved(folder("GRPO", 1), 2))


VIDEO, SD3 = "configs/models/shapes_video.yaml", "configs/shapes.yaml"
EDIT = "configs/shapes_edit.yaml"
CRITIC = "recipe.credit.class_path=flowalign.credit.LambdaReturn"


@pytest.mark.parametrize(
    ("file", "changes", "why"),
    [
        (SD3, [], "SD3 does not support it"),
        (SD3, [], "SD3Transformer2DModel: has no plan in diffusers"),
        ("configs/models/ltx_video.yaml", [], "masks keep all heads in diffusers 0.42.1"),
        ("configs/models/ltx2.yaml", [], "positions keep all tokens in diffusers 0.42.1"),
        (EDIT, [], "set policy.max_sequence_length to 12"),
        (SD3, [], "allowed here: 1. Supported by Wan, FLUX.1"),
        (VIDEO, ["sharding.context_degree=0"], "is 0; it must be at least 1"),
        (VIDEO, ["sharding.context_degree=3"], "20 tokens of a clip are not a multiple"),
        (VIDEO, ["sharding.context_degree=3"], "1, 2, 4; or a width 48 or height 48"),
        (VIDEO, ["sharding.context_degree=8"], "the 12 heads of"),
        (VIDEO, ["sharding.context_degree=8"], "allowed here: 1, 2, 4"),
        (VIDEO, ["speed.attention=_native_math"], "does not support it; allowed here: native"),
        (VIDEO, ["sharding.weights=blocks"], "sharding.weights blocks exclude each other"),
        (VIDEO, ["speed.compile=true"], "speed.compile exclude each other"),
        (VIDEO, ["quantization.denoiser=int8"], "quantization.denoiser int8 exclude each other"),
        (VIDEO, ["offload=layers", "device=auto"], "offload layers exclude each other"),
        (VIDEO, ["policy.lora=null"], "policy.lora is null; train a LoRA"),
        (VIDEO, ["recipe.critic={}", CRITIC], "recipe.credit reads features of the denoiser"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_weights_are_read(file, changes, why):
    with pytest.raises(ValueError, match=r"(?s).*context_degree") as caught:
        load(file, ["sharding.context_degree=2", *changes])
    assert why in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_recipes_that_were_not_tested_are_refused():
    with pytest.raises(ValueError, match="context_degree was not tested with the recipe Untested"):
        type("Untested", (Recipe,), dict.fromkeys(Recipe.__abstractmethods__))().check_context()


@slow
def test_groups_that_leave_processes_over_are_refused_and_samples_count_by_group():
    run, _ = load(VIDEO, ["sharding.context_degree=2"])
    for world in (1, 3):
        with pytest.raises(ValueError, match=rf"does not divide .* {world}: .*allowed here: 1"):
            plan(run, world)
    two, one = plan(run, 2), plan(load(VIDEO)[0], 1)
    differing = {row for row in one if one[row] != two.get(row)}
    memory = {"memory, about", "memory of activations", "fits a GPU of"}
    assert differing <= memory | {"evaluations of the rollout"}  # groups cannot keep graphs
    assert one["memory of activations"].startswith("251 MB")
    assert two["memory of activations"].startswith("125 MB")
