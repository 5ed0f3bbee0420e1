"""Runs with processes that divide the tokens of a clip equal runs without division."""

import json
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowalign.extra import RewardLevels, RewardWords
from flowalign.runs import Session, checks, load, plan, start, train
from flowalign.runs.checks import VelocityCheck
from flowalign.runs.model_card import Form, Trained, describe_subject, model_card
from flowalign.runs.sampling_job import SamplingJob, write_folder
from flowalign.training.held_out_evaluation import Evaluation, evaluate
from flowalign.training.recipe import Recipe
from flowalign.types import Request
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.rank_runs import (
    PROMPTS,
    RISING,
    assert_close,
    matching,
    policy_gradient,
    scored,
)
from tests.fixtures.ranks import on_ranks
from tests.fixtures.small_run import go, new_run
from tests.fixtures.tiny_video import build_wan
from tests.fixtures.training import ALONE, new_rewards

slow = pytest.mark.slow
SAMPLING = {"num_steps": 3, "samples_per_prompt": 3, "micro_batch": 8}
DATA = scored(SAMPLING, prompts_per_step=2)
RECIPES = {
    "GRPO": policy_gradient(SAMPLING | {"eta": 0.7}, prompts_per_step=2, micro_batch=8),
    "NFT": matching(DATA, "NFT", micro_batch=8, updates_per_step=1, old=RISING),
}
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "proj_out", "time_embedder.linear_1"]
"""Layers of blocks, and layers before the tokens are split and where they are gathered."""


def settings(model, recipe, **changes):
    """Two updates of a small adapter of a tiny Wan, with an evaluation before and after."""
    made = {
        **{"path": model, "precision": "fp32", "guidance": 1.0, "max_sequence_length": 24},
        "video": {"height": 32, "width": 48, "num_frames": 5, "fps": 8.0},
        "lora": {"rank": 2, "alpha": 3, "target_modules": TARGETS},
    }
    return {
        "policy": {"class_path": "pipelines.Wan", "init_args": made},
        "rewards": [{"class_path": "reward_models.TemporalFlicker", "weight": 1.0}],
        "num_steps": 2,
        "recipe": recipe,
        "optimizer": {"learning_rate": 1e-2, "eps": 1e-3, "max_grad_norm": 0.02},
        "evaluation": {"prompts": {"known": PROMPTS}, "num_prompts": 4, "num_steps": 2, "grid": 2},
        "checkpoints": {"every": 1, "verify": "always"},
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


def saved(folder, step=2):
    """All tensors of a checkpoint: of training, and the weights that diffusers loads."""
    place = folder / "checkpoints" / f"step-{step:06d}"
    files = sorted(place.rglob("*.safetensors"))
    assert len(files) == 5
    return {f"{f.relative_to(place)}:{n}": t for f in files for n, t in load_file(f).items()}


def rows(folder):
    return [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_equal_runs(ours, theirs):
    assert_close(saved(ours), saved(theirs))
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
    final, earlier = saved(one), saved(one, 1)
    trained = [n for n in final if n.startswith("state") and "parameter" in n and "lora_B" in n]
    assert max(float(final[n].abs().max()) for n in trained) > 1e-3, "nothing was trained"
    assert any(not torch.equal(final[n], earlier[n]) for n in trained)
    assert_equal_runs(divided, one)
    assert json.loads((divided / "summary.json").read_text())["processes"] == 2


@slow
@pytest.mark.parametrize(("before", "degree"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_tokens_divided_or_whole_again(tmp_path, made, before, degree):
    folder, model = made
    resume = folder("GRPO", before) / "checkpoints/step-000001"
    sharding = {"context_degree": degree}
    resumed = run(tmp_path / "on", model, "GRPO", degree, resume=resume, sharding=sharding)
    assert_close(saved(resumed), saved(folder("GRPO", 1)))


@slow
def test_four_processes_in_two_groups_make_the_updates_of_one(tmp_path, made):
    folder, model = made
    changes = {"evaluation": None, "sharding": {"context_degree": 2}}
    four = run(tmp_path / "four", model, "GRPO", 4, **changes)
    assert_close(saved(four), saved(folder("GRPO", 1)))


VIDEO, SD3 = "configs/models/shapes_video.yaml", "configs/shapes.yaml"
EDIT = "configs/shapes_edit.yaml"
NO_PLAN = """SD3 does not support it: SD3Transformer2DModel: has no plan in diffusers 0.42.1; \
allowed here: 1. Supported by Wan, FLUX.1"""
TOKENS = "20 tokens of a clip are not a multiple of it; allowed here: 1, 2, 4, or another height"
HEADS = "must also divide the 12 heads of assets/shapes_video/wan; allowed here: 1, 2, 4"
CRITIC = "recipe.credit.class_path=flowalign.credit.LambdaReturn"


@pytest.mark.parametrize(
    ("file", "changes", "why"),
    [
        (SD3, [], NO_PLAN),
        ("configs/models/ltx_video.yaml", [], "masks keep all heads in diffusers 0.42.1"),
        ("configs/models/ltx2.yaml", [], "positions keep all tokens in diffusers 0.42.1"),
        (EDIT, [], "set policy.max_sequence_length to 12"),
        (VIDEO, ["sharding.context_degree=0"], "is 0; it must be at least 1"),
        (VIDEO, ["sharding.context_degree=3"], TOKENS),
        (VIDEO, ["sharding.context_degree=8"], HEADS),
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


# A run whose first updates hardly change the velocity warns once, with the rate to raise ----------


class Policy:
    text_encoder = SimpleNamespace(probe_requests=lambda: ["a", "b"])
    weight = 1.0

    def noise(self, num_samples, generator):
        return torch.randn(num_samples, 3, generator=generator)

    def schedule(self, num_steps):
        return torch.linspace(1, 0, num_steps + 1)

    def velocity(self, x, sigma, cond):
        return self.weight * x * sigma * cond


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(checks, "encode_requests", lambda _, requests: len(requests))
    learner = SimpleNamespace(
        cfg=SimpleNamespace(warmup=5, learning_rate=5e-6),
        **{"total_updates": 30, "num_updates": 0, "num_skipped": 1},
    )
    session = Mock(spec=Session)
    session.run = SimpleNamespace(policy=Policy())
    session.costs = SimpleNamespace(paused=nullcontext)
    session.learner, session.first_step, session.said = learner, 0, []
    session.messages = session.said.append
    return session


@pytest.mark.parametrize(("weight", "warns"), [(1 + 9e-5, True), (1 + 2e-4, False)])
def test_the_change_is_relative_and_due_after_warm_up(session, weight, warns):
    check = VelocityCheck(session)
    session.run.policy.weight = weight
    session.learner.num_updates = 25  # one of them was skipped
    assert check.after_step() == {}
    session.learner.num_updates = 26
    change = check.after_step()["check/velocity_change"]
    assert change == pytest.approx(weight - 1, rel=1e-2)
    assert check.after_step() == {}
    assert ["optimizer.learning_rate, which is 5e-06" in line for line in session.said] == (
        [True] if warns else []
    )


@pytest.mark.parametrize(
    ("owner", "key", "value"),
    [
        ("session", "first_step", 3),
        ("learner", "total_updates", 24),
        ("policy", "text_encoder", None),
    ],
)
def test_nothing_is_evaluated_where_no_check_is_due(session, owner, key, value):
    named = {"session": session, "learner": session.learner, "policy": session.run.policy}
    setattr(named[owner], key, value)
    session.run.policy.velocity = pytest.fail if key != "text_encoder" else None
    check = VelocityCheck(session)
    session.learner.num_updates = 100
    assert check.after_step() == {}


# Runs with prompt conditioning: evaluated, summarised and resumed with it -------------------------


LEVELS = RewardLevels(thresholds={"redness": [0.1]}, words={"redness": ["dull", "vivid"]})


def test_the_folder_of_a_run_says_how_to_ask(tmp_path):
    run = new_run(tmp_path / "run", conditioning=LEVELS, num_steps=1)
    assert plan(run)["sampling asks"] == "PROMPT, vivid"
    assert go(run)["sampling_asks"] == "PROMPT, vivid"
    config = tmp_path / "config.yaml"
    config.write_text("policy: {init_args: {path: base}}\nrecipe: {class_path: Recipe}\n")
    trained, form = Trained(tmp_path, config, None), Form("diffusers", "fp32", tmp_path)
    card = model_card(describe_subject(run), trained, form)
    assert "## Words" in card
    assert "\n    PROMPT, vivid\n" in card
    plain = new_run(tmp_path / "plain", num_steps=1)
    assert "sampling asks" not in plan(plain)
    subject = describe_subject(plain)
    assert "## Words" not in model_card(subject, trained, form)
    parrot = RewardWords(words={"redness": "<r>"})
    told = plan(new_run(tmp_path / "parrot", conditioning=parrot))["sampling asks"]
    assert told == "<r> PROMPT; weight 5, PROMPT alone 5, the empty prompt the remaining weight"


def test_held_out_prompts_are_asked_for_with_words_and_scored_without(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("tea\n")
    conditioned = tmp_path / "conditioned.txt"
    conditioned.write_text("tea, vivid\n")
    policy = PixelPolicy(seed=2)
    torch.nn.init.normal_(policy.denoiser[-1].weight, generator=torch.Generator().manual_seed(1))

    def found(path, conditioning=None):
        cfg = Evaluation(prompts={"all": str(path)}, num_prompts=2, num_steps=3)
        return evaluate(policy, new_rewards(), cfg, ALONE, conditioning)

    with_words = found(file, LEVELS)
    same = found(conditioned)
    assert with_words.metrics == same.metrics
    assert with_words.metrics != found(file).metrics
    assert [r.prompt for r in with_words.grid_requests] == ["tea", "tea"]


def test_sampled_folders_ask_with_words_and_list_the_prompt(tmp_path):
    def job(prompt, conditioning):
        run = new_run(tmp_path / "run", conditioning=conditioning)
        torch.nn.init.normal_(
            run.policy.denoiser[-1].weight, generator=torch.Generator().manual_seed(1)
        )
        asked = [Request(prompt)]
        return SamplingJob(run, {"seed": 3}, asked, 2, 4, 3, None, tmp_path / f"{len(prompt)}", 2)

    drawn = [
        one.media(one.requests * 2, [generator(3, "x", i) for i in range(2)])
        for one in (job("tea", LEVELS), job("tea, vivid", None), job("tea", None))
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    write_folder(job("tea", LEVELS))
    listing = (tmp_path / "3" / "metadata.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in listing] == ["tea", "tea"]


def test_words_of_other_rewards_are_refused_before_weights_are_read(tmp_path):
    with pytest.raises(ValueError, match="names blue, which no reward gives"):
        new_run(tmp_path / "run", conditioning=RewardLevels(thresholds={"blue": [0.1]}))
