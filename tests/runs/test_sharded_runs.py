"""Whole runs with sharded weights equal runs of one process, for every kind."""

import json
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from flowalign.runs import load, start, train
from flowalign.runs.policy_setup import check_world
from flowalign.types import Sharding
from tests.fixtures.rank_runs import (
    PROMPTS,
    RISING,
    assert_close,
    matching,
    policy_gradient,
    scored,
)
from tests.fixtures.ranks import on_ranks
from tests.fixtures.stopped_runs import SMALL

TRANSFORMER, WEIGHTS = "transformer", "diffusion_pytorch_model.safetensors"
SAMPLING = {"num_steps": 4, "samples_per_prompt": 4, "micro_batch": 7}
FIXED = {"class_path": "flowalign.sampling.Fixed", "init_args": {"start": 0, "stop": 2}}
FEW = {"prompts_per_step": 3, "micro_batch": 5}
ONLINE_PAIRS = {
    "class_path": "flowalign.training.matching.Rollouts",
    "init_args": {
        **{"prompts": PROMPTS, "prompts_per_step": 3, "samples_per_prompt": 4, "num_steps": 4},
        "rule": {"class_path": "flowalign.data.BestWorst", "init_args": {"count": 1}},
    },
}


def rollouts(branching="flowalign.sampling.Chain", **settings):
    sampling = {"eta": 1.0, "sde_window": FIXED, "branching": {"class_path": branching}}
    return policy_gradient(SAMPLING | sampling, **FEW | settings)


def groups(loss, weights="old", **settings):
    data = scored(SAMPLING, prompts_per_step=3, weights=weights)
    return matching(data, loss, micro_batch=5, **settings)


def pairs(**settings):
    return matching(ONLINE_PAIRS, "DPO", micro_batch=5, **settings)


RECIPES = {
    "outcome": rollouts(),
    "branches": rollouts(
        "flowalign.sampling.Tree", credit={"class_path": "flowalign.credit.Branch"}
    ),
    "turning points": rollouts(credit={"class_path": "flowalign.credit.TurningPoint"}),
    "DPO": pairs(),
    "NFT": groups("NFT", updates_per_step=1, old=RISING),
    "reward gradient": {
        "class_path": "flowalign.training.RewardGradient",
        "init_args": {
            **{"prompts": PROMPTS, "prompts_per_step": 3, "micro_batch": 2, "kl": 0.1},
            "gradient_path": {
                "class_path": "flowalign.gradient_paths.DRaFT",
                "init_args": {"last_steps": 2},
            },
            "start": {
                "class_path": "flowalign.training.reward_gradient.FromRollouts",
                "init_args": {"num_steps": 4},
            },
        },
    },
}


AVERAGE = "flowalign.training.matching.EMAReference"
COPY = {"class_path": AVERAGE, "init_args": {"decay": 0.5, "per": "update"}}
ANCHOR, BEHAVIOUR = {"decay": 0.6, "per": "update"}, {"decay": {"slope": 0.3, "highest": 0.9}}
AVERAGED = {
    "AWM": groups("AWM", updates_per_step=2, old={"decay": 0.0}, anchor=ANCHOR),
    "CRD": groups("CRD", "behaviour", old={"decay": 0.0}, behaviour=BEHAVIOUR),
    "an average as reference": pairs(reference=COPY),
}
"""Recipes that exchange the weights for averages within a step."""
WIDE = {"wide": rollouts(prompts_per_step=5)}
"""Enough prompts for four processes."""
EVERY = RECIPES | AVERAGED | WIDE
WHOLE = ("outcome", "DPO", "reward gradient", "NFT", *AVERAGED)
"""Recipes that also train all weights."""
SMOOTH = {"class_path": "tests.fixtures.pixel.SmoothRedness", "weight": {"redness": 1.0}}


@pytest.fixture(scope="module", autouse=True)
def two_blocks(tmp_path_factory):
    """Train the toy model without three of its five blocks: each one that is sharded takes time."""
    folder = tmp_path_factory.mktemp("model") / "sd3"
    shutil.copytree(SMALL["policy"]["init_args"]["path"], folder)
    config, weights = folder / TRANSFORMER / "config.json", folder / TRANSFORMER / WEIGHTS
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_layers": 2}))
    kept = {}
    for name, value in load_file(weights).items():
        block = re.match(r"transformer_blocks\.(\d)\.", name)
        if block is None or block[1] == "0":
            kept[name] = value
        elif block[1] == "4":  # the last block of SD3 has other layers
            kept[name.replace("blocks.4.", "blocks.1.")] = value
    save_file(kept, weights)
    policy = SMALL["policy"] | {"init_args": SMALL["policy"]["init_args"] | {"path": str(folder)}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SMALL, "policy", policy)
        yield


def settings(recipe, whole=False, **changes):
    """Two updates of a small adapter, by rewards that drop no group."""
    gradient = "RewardGradient" in recipe["class_path"]
    rewards = [SMOOTH] if gradient else SMALL["rewards"]
    own = {"rewards": rewards, "num_steps": 2, "recipe": recipe}
    optimizer = {"learning_rate": 1e-2, "eps": 1e-3, "max_grad_norm": 0.02}
    checkpoints = {"every": 1, "verify": "always" if recipe is RECIPES["branches"] else "never"}
    own["policy"] = SMALL["policy"]
    if whole:
        own["policy"] = own["policy"] | {"init_args": own["policy"]["init_args"] | {"lora": None}}
    return SMALL | own | {"optimizer": optimizer, "checkpoints": checkpoints} | changes


def _runs(processes, folder, runs, resume):
    for name, own in runs.items():
        file = Path(folder) / f"{name}{processes.rank}.yaml"
        file.write_text(yaml.safe_dump(own | {"output_dir": f"{folder}/{name}"}))
        run, text = load(str(file))
        train(start(run, text, lambda _: None, resume=resume))


def run(folder, names, world, *, resume=None, **changes):
    folder.mkdir(exist_ok=True)
    ranks = folder / f"ranks{world}{resume is None}"
    runs = {name: settings(EVERY[name], **changes) for name in names}
    for own in runs.values():
        own["recipe"]["init_args"]["on_failed_check"] = "warn"
    on_ranks(_runs, world, ranks, str(folder), runs, resume)
    return folder


def state(folder, step=2):
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "state/training.safetensors")


def saved(folder, step=2):
    """The weights that diffusers loads, live and averaged."""
    place = folder / "checkpoints" / f"step-{step:06d}"
    return {
        f"{kind}{name}": value
        for kind in ("", "ema/")
        for name, value in load_file(place / kind / TRANSFORMER / WEIGHTS).items()
    }


BLOCKS = {"weights": "blocks"}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function that returns the folder of a run on one, two or two sharded processes.

    Processes start once for all runs with the same settings, because starting takes longer than a
    run.
    """
    root = tmp_path_factory.mktemp("runs")

    @cache
    def launch(names, world, weights, trained):
        changes = {"sharding": {"weights": weights}, "whole": trained == "all"}
        return run(root / f"{names[0]}{world}{weights}{trained}", names, world, **changes)

    def folder(name, world, weights="replicated", trained="adapter"):
        names = {"adapter": tuple(RECIPES), "all": WHOLE}[trained]
        return launch(names if name in names else (name,), world, weights, trained) / name

    return folder


@slow
@pytest.mark.parametrize("name", RECIPES)
def test_one_process_two_and_two_that_share_weights_make_the_same_updates(name, made):
    one, two, sharded = made(name, 1), made(name, 2), made(name, 2, "blocks")
    final, first = state(one), state(one, 1)
    moved = [n for n in final if "lora_B" in n and n.startswith("parameter")]
    assert max(float(final[n].abs().max()) for n in moved) > 1e-3, "nothing was trained"
    assert any(not torch.equal(final[n], first[n]) for n in moved)
    assert_close(state(two), final)
    assert_close(state(sharded), final)
    rows = [(f / "metrics.jsonl").read_text().splitlines() for f in (two, sharded)]
    for ours, theirs in zip(*(map(json.loads, r) for r in rows), strict=True):
        for key in ("optim/grad_norm", "cost/network_evaluations"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3), key


def continued(stopped, folder, name, world, **changes):
    """The folder of a copy of a stopped run that `world` processes continue."""
    shutil.copytree(stopped / name, folder / name)
    saved = folder / name / "checkpoints/step-000001"
    return run(folder, [name], world, sharding=BLOCKS, resume=saved, **changes) / name


@slow
def test_a_sharded_run_goes_on_as_two_processes_and_as_one(tmp_path, made):
    straight = state(made("outcome", 2, "blocks"))
    stopped = run(tmp_path / "stopped", ["outcome"], 2, sharding=BLOCKS, num_steps=1)
    for world in (2, 1):
        resumed = state(continued(stopped, tmp_path / str(world), "outcome", world))
        assert_close(resumed, straight, tolerance=0.0 if world == 2 else 1e-6)


@slow
@pytest.mark.parametrize("name", WHOLE)
def test_all_weights_are_trained_in_parts_as_in_one_piece(name, made):
    one, sharded = made(name, 1, trained="all"), made(name, 2, "blocks", "all")
    final, first = saved(one), saved(one, 1)
    assert max(float((final[n] - first[n]).abs().max()) for n in final) > 1e-4, "nothing moves"
    assert_close(saved(sharded), final)
    rows = [(f / "metrics.jsonl").read_text().splitlines() for f in (one, sharded)]
    for ours, theirs in zip(*(map(json.loads, r) for r in rows), strict=True):
        assert ours["optim/grad_norm"] == pytest.approx(theirs["optim/grad_norm"], rel=1e-3)


@slow
def test_four_processes_with_two_copies_of_all_weights_make_the_updates_of_one(tmp_path, made):
    """Hybrid sharding: each half of the processes shares a copy, and gradients add over both."""
    hybrid = {"weights": "blocks", "shard_degree": 2}
    four = run(tmp_path / "four", ["wide"], 4, sharding=hybrid, whole=True) / "wide"
    assert_close(saved(four), saved(made("wide", 1, trained="all")))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Folder of runs that train all weights in parts and stop after one of two steps."""
    folder = tmp_path_factory.mktemp("stopped") / "runs"
    return run(folder, ["NFT", "outcome"], 2, sharding=BLOCKS, num_steps=1, whole=True)


@slow
def test_a_run_with_an_old_policy_in_parts_goes_on_as_it_would_have(tmp_path, made, stopped):
    resumed = saved(continued(stopped, tmp_path / "2", "NFT", 2, whole=True))
    assert_close(resumed, saved(made("NFT", 2, "blocks", "all")), tolerance=0.0)


@slow
def test_a_teacher_of_all_weights_is_the_same_in_parts(tmp_path, made, monkeypatch):
    path = str(made("outcome", 1, trained="all") / "checkpoints/step-000002")
    own = {"class_path": "flowalign.training.matching.Teacher", "init_args": {"path": path}}
    monkeypatch.setitem(EVERY, "taught", pairs(reference=own))
    one, two = (
        run(tmp_path / str(world), ["taught"], world, sharding=sharding, whole=True) / "taught"
        for world, sharding in ((1, {}), (2, BLOCKS))
    )
    plain, found = saved(made("DPO", 1, trained="all")), saved(one)
    assert max(float((found[n] - plain[n]).abs().max()) for n in found) > 1e-4, "it teaches nothing"
    assert_close(saved(two), found, tolerance=1e-5)  # it pulls hard, and so does rounding


@slow
def test_a_run_that_trains_all_in_parts_goes_on_as_two_processes_and_as_one(
    tmp_path, made, stopped
):
    straight = saved(made("outcome", 2, "blocks", "all"))
    for world in (2, 1):
        resumed = saved(continued(stopped, tmp_path / str(world), "outcome", world, whole=True))
        assert_close(resumed, straight, tolerance=0.0 if world == 2 else 1e-6)


def test_a_world_that_groups_do_not_divide_is_refused_with_those_that_do():
    check_world(Sharding(weights="blocks", shard_degree=3), 6)
    check_world(Sharding(weights="blocks"), 7)
    with pytest.raises(ValueError, match=r"shard_degree is 4, which does not divide .* 6: "):
        check_world(Sharding(weights="blocks", shard_degree=4), 6)


FP16 = ["policy.precision=fp16", "device=auto"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["sharding.shard_degree=2"], "sharding.weights is replicated; set it to blocks"),
        (["sharding.weights=blocks", "speed.compile=true", "policy.lora=null"], "need a LoRA"),
        (["sharding.weights=block"], "blocks"),
        (["sharding.weights=blocks", "policy.lora=null", *FP16], "fp32 or bf16"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_weights_are_read(changes, why):
    with pytest.raises(ValueError, match=r"(?s).*sharding.*") as caught:
        load("configs/shapes.yaml", changes)
    assert why in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5
