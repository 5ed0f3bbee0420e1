"""Composed run files hold the constants that papers and their code publish.

Each table names its source. A class default is no constant of a run file until it is composed, so
whole runs are built.
"""

import json
import time
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import yaml

from flowalign.runs.config import load
from flowalign.utils.errors import ConfigError
from flowalign.utils.tracking import read_metrics
from tests.fixtures.run_files import CONFIGS, loaded
from tests.fixtures.stopped_runs import train_here

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
    # MEND, arXiv:2610.05954, on SD3.5-M with one reward, and on Z-Image-Turbo
    (SD35, METHODS + "mend.yaml"): {
        "num_steps": 100,
        "policy.guidance": 1.0,
        "recipe.data.prompts_per_step": 48,
        "recipe.data.sampling.num_steps": 10,
        "recipe.data.sampling.samples_per_prompt": 24,
        "recipe.data.sampling.tail_ratio": 1.0,
        "recipe.data.proposals.query": 8,
        "recipe.data.proposals.lengths": [0.1, 0.2, 0.4],
        "recipe.data.proposals.quantile": 0.75,
        "recipe.data.proposals.price": 0.1,
        "recipe.data.proposals.keep": 10.0,
        "recipe.data.proposals.micro_batch": 6,
        "recipe.old.decay.slope": 0.001,
        "recipe.old.decay.highest": 0.5,
        "recipe.times.start": 8,
        "policy.network.lora.rank": 32,
        "policy.network.lora.alpha": 64,
        "optimizer.learning_rate": 3e-4,
        "optimizer.eps": 1e-12,
        "ema.decay": 0.9,
        "ema.every": 1,
    },
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


# Every number of a complete run file, at and beyond the ends of its range: a run, or a ------------


POLICY_GRADIENT = "configs/shapes.yaml"
FILES = {
    POLICY_GRADIENT: "",
    "configs/shapes_video_tempflow.yaml": ("policy.", "recipe."),
    "configs/preference/shapes/online_dpo.yaml": "recipe.",
}
"""Files of every kind, and how the keys begin that no file before them has."""
VALUES = ["0", "-1", "2147483648", "1e38", "1e39", ".nan", "[]", "five"]
NEVER = {"1e39", ".nan", "[]"}
"""Values that no number may have."""


def numbers_of(settings: object, key: str = "") -> list[str]:
    """Return the keys of all numbers, as overrides name them."""
    if isinstance(settings, dict):
        within = settings.get("init_args") or {} if "class_path" in settings else settings
        found = [numbers_of(v, f"{key}.{n}" if key else n) for n, v in within.items()]
        return [name for names in found for name in names]
    is_number = isinstance(settings, int | float) and not isinstance(settings, bool)
    return [key] if is_number else []


def outcome(file: str, key: str, value: str) -> str:
    """Load the file with one number changed; errors have only a few lines."""
    said = ""
    try:
        load(file, [f"--{key}", value])
    except ConfigError as error:
        said = str(error)
    assert len(said.splitlines()) <= 5, said
    assert len(said) < 1500, said
    return said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("file", "begin"), FILES.items(), ids=FILES)
def test_every_number_is_refused_in_a_few_lines_or_gives_a_run_at_once(file, begin):
    """Nothing but a message comes of a wrong one: no traceback, no endless loop, no run."""
    _, text = load(file)
    keys = [key for key in numbers_of(yaml.safe_load(text)) if key.startswith(begin)]
    assert len(keys) > 8
    for key in keys:
        for value in VALUES:
            started = time.monotonic()
            said = outcome(file, key, value)
            assert time.monotonic() - started < 30, (key, value)
            if value in NEVER:
                assert said, (key, value)
                assert any(name in said for name in key.split(".")[-2:]), (key, value, said)


# A method asks for guidance in one word, and each model family maps it to its own settings --------


EMBEDDED = ("flux1_dev", "flux2_dev")
GUIDED = ("sd35_medium", "sd15", "qwen_image", "wan21_1_3b")


def layered(model, method, *overrides):
    files = [CONFIGS / f"models/{model}.yaml", CONFIGS / f"methods/{method}.yaml"]
    return load([str(file) for file in files], overrides)[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["nft", "awm", "crd", "dgpo", "tdm"])
@pytest.mark.parametrize("model", [*EMBEDDED, *GUIDED])
def test_a_method_loads_with_and_without_classifier_free_guidance(model, method):
    policy = layered(model, method).policy
    guided = method == "dgpo" and model in GUIDED
    assert policy.evaluations_per_velocity == 1 + guided
    assert (policy.guidance > 1) == guided
    assert (policy.model_guidance > 1) == (model in GUIDED)


def test_a_distilled_scale_stays_an_input_of_the_network():
    assert layered("flux1_dev", "nft").policy.embedded_guidance == 3.5


def test_a_guided_reference_has_the_scale_of_the_model():
    crd = layered("sd35_medium", "crd")
    assert crd.recipe.reference.count_evaluations(crd.policy) == 2
    crd = layered("flux1_dev", "crd")
    assert crd.recipe.reference.count_evaluations(crd.policy) == 1


@pytest.mark.parametrize(
    ("model", "method", "override", "words"),
    [
        ("flux1_dev", "crd", "recipe.reference.guidance=3", "Flux1 has no classifier-free"),
        ("flux1_dev", "tdm", "recipe.real_guidance=3", "Flux1 has no classifier-free"),
        ("flux1_dev", "tdm_r1", "seed=1", "has no direction"),
        ("sd35_medium", "tdm_r1", "recipe.start=runs/absent", "'runs/absent' does not exist"),
        ("sd35_medium", "flow_opd", "seed=1", "recipe.teachers: the checkpoint"),
        ("sd35_medium", "tdm", "guidance=model", 'set guidance to "off"'),
    ],
)
def test_guidance_and_checkpoints_that_training_lacks_are_refused(model, method, override, words):
    with pytest.raises(ConfigError, match=words):
        layered(model, method, f"--{override}")


# Run files of the newer image families have the defaults of their policies, and DPO its -----------


FAMILIES = "z_image", "flux2_klein", "flux2_dev", "krea2", "qwen_image21", "sana"


@pytest.mark.parametrize("family", FAMILIES)
def test_adapted_layers_are_those_of_the_family_s_default(family):
    """But for the number of single blocks of FLUX.2-klein, which has 20 with 4 billion weights."""
    policy = loaded(Path("configs/models") / f"{family}.yaml")[0].policy
    default = type(policy)("none").lora.target_modules
    given = policy.lora.target_modules
    if family == "flux2_klein":
        assert tuple(given) == default[: len(given)]
        assert given[-1] == "single_transformer_blocks.19.attn.to_out"
    else:
        assert tuple(given) == default


def test_flow_dpo_has_the_values_of_the_run_file_for_stable_diffusion():
    """Both quote the same sources."""
    method = load(
        ["configs/models/krea2.yaml", "configs/methods/flow_dpo.yaml"], ["recipe.data.path=configs"]
    )[0]
    pair = load(["configs/preference/sd35_dpo.yaml"], ["recipe.data.path=configs"])[0]
    for name in ("loss", "space", "times", "micro_batch"):
        assert getattr(method.recipe, name) == getattr(pair.recipe, name)
    assert method.recipe.data.batch_size == pair.recipe.data.batch_size
    assert method.optimizer == pair.optimizer


# Samples during training: their files, the report, and a run that they do not change --------------


BARE = ("--evaluation", "null", "--num_steps", "4")


@pytest.mark.slow
def test_a_run_without_evaluation_shows_samples_and_trains_as_without_them(tmp_path, caplog):
    shown, plain = tmp_path / "shown", tmp_path / "plain"
    train_here(shown, *BARE, "--samples.every", "2", "--samples.num_prompts", "3")
    train_here(plain, *BARE)
    index = json.loads((shown / "training_samples/index.json").read_text())
    assert (index["steps"], len(index["prompts"])) == ([2, 4], 3)
    assert (shown / "training_samples/step-000004.png").is_file()
    page = (shown / "report.html").read_text()
    assert index["prompts"][0] in page
    assert not (plain / "training_samples").exists()
    one, other = (
        [[row[name] for name in ("reward_mean", "optim/grad_norm")] for row in read_metrics(folder)]
        for folder in (shown, plain)
    )
    assert one == other
    costs = [json.loads((f / "summary.json").read_text())["reward_calls"] for f in (shown, plain)]
    assert costs[0] == costs[1]
    assert "open an issue" not in caplog.text


def test_samples_need_prompts(tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"prompt": "a", "chosen": "a.png", "rejected": "b.png"}\n')
    settings = [f"recipe.data.path={data}", "recipe.data.held_out=null", "samples.every=2"]
    with pytest.raises(ValueError, match=r"samples\.prompts is null, and the recipe has no prompt"):
        load(["configs/preference/shapes/dpo.yaml"], settings)
