"""Composed run files hold the constants that papers and their code publish.

Each table names its source. A class default is no constant of a run file until it is composed, so
whole runs are built.
"""

from operator import attrgetter

import pytest
import torch

from flowalign.runs.config import load

MODELS, METHODS, CREDIT = "configs/models/", "configs/methods/", "configs/credit/"
FLUX = MODELS + "flux1_dev.yaml"
SD35, KONTEXT = MODELS + "sd35_medium.yaml", MODELS + "flux1_kontext.yaml"
PUBLISHED = {
    # AWM, arXiv:2509.25050: scxue/advantage_weighted_matching, config/dgx_awm.py for GenEval
    (SD35, METHODS + "awm.yaml"): {
        "recipe.kl": 0.001,
        "recipe.loss.advantage_scale": 0.2,
        "recipe.loss.weighting": "generalised_huber",
        "recipe.loss.clip": 1.0,
        "recipe.loss.anchor_weight": 1.0,
        "recipe.anchor.decay.slope": 0.001,
        "recipe.anchor.decay.highest": 0.3,
        "recipe.data.sampling.num_steps": 14,
        "recipe.data.sampling.samples_per_prompt": 24,
        "recipe.times_per_sample": 6,
        "optimizer.learning_rate": 3e-4,
    },
    # DiffusionNFT, arXiv:2509.16117 and its SD3.5-M configuration for GenEval
    (SD35, METHODS + "nft.yaml"): {
        "recipe.kl": 1e-4,
        "recipe.loss.beta": 1.0,
        "recipe.data.sampling.num_steps": 10,
        "recipe.data.sampling.samples_per_prompt": 24,
        "recipe.data.prompts_per_step": 48,
        "optimizer.learning_rate": 3e-4,
    },
    # DGPO, arXiv:2510.08425 and its SD3.5-M configuration for GenEval
    (SD35, METHODS + "dgpo.yaml"): {
        "recipe.kl": 0.02,
        "recipe.loss.beta": 100.0,
        "recipe.old.decay.slope": 0.001,
        "recipe.old.decay.highest": 0.3,
        "policy.network.lora.rank": 64,
    },
    # CRD, arXiv:2603.14128, as in Flow-Factory's SD3.5-M configuration for text
    (SD35, METHODS + "crd.yaml"): {"recipe.loss.kl": 0.1, "recipe.loss.least_kl": 1e-4},
    # MEND, arXiv:2610.05954, on Z-Image-Turbo
    (MODELS + "z_image.yaml", METHODS + "mend.yaml", "configs/tasks/mend_turbo.yaml"): {
        "num_steps": 100,
        "policy.guidance": 1.0,
        "recipe.data.prompts_per_step": 48,
        "recipe.data.sampling.num_steps": 9,
        "recipe.data.sampling.samples_per_prompt": 12,
        "recipe.data.sampling.tail_ratio": None,
        "recipe.data.proposals.query": 8,
        "recipe.data.proposals.quantile": 0.75,
        "recipe.times.start": 8,
        "policy.network.lora.rank": 32,
        "optimizer.learning_rate": 3e-4,
        "optimizer.eps": 1e-12,
    },
    # MixGRPO, arXiv:2507.21802v7: FLUX.1, then SD3.5-M
    (CREDIT + "flux1_dev/mixgrpo.yaml",): {
        "recipe.sampling.num_steps": 25,
        "recipe.sampling.samples_per_prompt": 12,
        "recipe.sampling.eta": 0.7,
        "recipe.sampling.sde_window.size": 4,
        "recipe.sampling.sde_window.every": 25,
        "recipe.sampling.sde_window.stride": 1,
        "recipe.updates_per_step": 4,
        "recipe.algorithm.kl_coef": 0.0,
        "num_steps": 300,
    },
    (CREDIT + "sd35_medium/mixgrpo.yaml",): {
        "recipe.prompts_per_step": 96,
        "recipe.sampling.num_steps": 10,
        "recipe.sampling.samples_per_prompt": 24,
        "recipe.sampling.sde_window.size": 4,
        "recipe.sampling.sde_window.every": 150,
        "recipe.algorithm.kl_coef": 0.001,
        "optimizer.learning_rate": 3e-4,
        "policy.guidance": 4.5,
    },
    # GRPO-Guard, arXiv:2510.22319v1
    (SD35, METHODS + "grpo_guard.yaml"): {
        "recipe.algorithm.surrogate.clip": 2e-6,
        "recipe.algorithm.kl_coef": 0.0,
        "recipe.step_weight": "inverse_dt",
        "optimizer.learning_rate": 1e-4,
    },
    # Flow-DPPO, arXiv:2606.11025v1, and UniRL's code
    (CREDIT + "sd35_medium/flow_dppo.yaml",): {
        "recipe.algorithm.surrogate.clip": 1e-5,
        "recipe.sampling.samples_per_prompt": 16,
        "recipe.updates_per_step": 2,
        "policy.guidance": 1.0,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("files", PUBLISHED, ids=lambda files: files[-1])
def test_a_composed_run_has_the_published_constants(files):
    run, _ = load(list(files), [])
    assert {key: attrgetter(key)(run) for key in PUBLISHED[files]} == PUBLISHED[files]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mixgrpo", "mixgrpo_flash", "dynamic_treerpo"])
@pytest.mark.parametrize("model", [SD35, KONTEXT])
def test_a_sliding_window_passes_all_steps_but_the_last(method, model):
    assert_even([model, f"{METHODS}{method}.yaml"])


def test_the_window_of_sd35_passes_all_steps_but_the_last():
    assert_even([CREDIT + "sd35_medium/mixgrpo.yaml"])


def assert_even(files):
    """Each position of the window has the same number of training steps, up to one turn."""
    run, _ = load(files, [])
    sampling = run.recipe.sampling
    window, num_steps = sampling.sde_window, sampling.num_steps
    chosen = [window.steps(num_steps, i, torch.Generator()) for i in range(run.num_steps)]
    counts = [chosen.count(positions) for positions in set(chosen)]
    assert {k for steps in chosen for k in steps} == set(range(num_steps - 1))
    assert max(counts) - min(counts) <= window.every


@pytest.mark.parametrize(
    "files",
    [
        (FLUX, METHODS + "srpo.yaml"),
        (CREDIT + "flux1_dev/mixgrpo.yaml",),
        (CREDIT + "flux1_dev/mixgrpo_flash.yaml",),
        (FLUX, METHODS + "e_grpo.yaml"),
        (FLUX, METHODS + "g2rpo.yaml"),
        (FLUX, METHODS + "dance_grpo.yaml"),
        (MODELS + "wan21_1_3b.yaml", METHODS + "worldcompass_wan.yaml"),
        (SD35, METHODS + "tree_grpo.yaml"),
        (SD35, METHODS + "branch_grpo.yaml"),
        (MODELS + "sd15.yaml", METHODS + "parrot.yaml"),
        (FLUX, METHODS + "d2_align.yaml"),
        (SD35, METHODS + "refl.yaml"),
        (FLUX, METHODS + "draft_lv.yaml"),
        ("configs/reward_gradient/sd35_medium.yaml",),
        (MODELS + "wan21_1_3b.yaml", METHODS + "online_dpo_video.yaml"),
        ("configs/preference/wan_mpo.yaml",),
        ("configs/preference/wan_gapo.yaml",),
    ],
)
def test_adapters_get_a_rate_that_moves_them(files, tmp_path):
    """The rates for all weights move an adapter by .014 % in 20 updates, see tasks/lora_rate."""
    run = load_on_any_machine(files, tmp_path)
    assert run.policy.network.lora is not None
    assert run.optimizer.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("files", "rate"),
    [
        ((SD35, METHODS + "kvpo.yaml"), 1e-5),
        ((SD35, METHODS + "align_prop.yaml"), 1e-3),
        ((MODELS + "wan21_1_3b.yaml", METHODS + "vader.yaml", "configs/tasks/hpsv2.yaml"), 2e-4),
        (("configs/preference/wan_flow_dpo.yaml",), 5e-6),
        (("configs/preference/wan_local_dpo.yaml",), 5e-6),
        (("configs/preference/wan_dense_dpo.yaml",), 1e-5),
    ],
)
def test_published_rates_of_adapters_are_kept(files, rate, tmp_path):
    run = load_on_any_machine(files, tmp_path)
    assert run.policy.network.lora is not None
    assert run.optimizer.learning_rate == rate


def load_on_any_machine(files, folder):
    """Return a run; a file takes the place of stored pairs."""
    data = folder / "pairs.jsonl"
    data.touch()
    stored = (
        [f"recipe.data.path={data}", "recipe.data.held_out=null"]
        if "preference/" in files[0]
        else []
    )
    return load(list(files), stored)[0]
