"""The run files that come with the package."""

import pytest

from flowalign.runs.config import load
from flowalign.runs.planning import plan
from flowalign.utils.errors import ConfigError
from pipelines.families.flux1 import LORA
from tests.fixtures.run_files import CONFIGS as FOLDER
from tests.fixtures.run_files import METHODS, MODELS, files_of, loaded

NEEDS_PAIRS = FOLDER / "words_dpo.yaml"
"""A run file whose pairs its user makes first; `check` refuses it without them."""
CONFIGS = sorted({*FOLDER.glob("*.yaml"), *(FOLDER / "models").glob("*.yaml")} - {NEEDS_PAIRS})


def named(path):
    """The file without what all paths have in common."""
    return str(path.relative_to(FOLDER).with_suffix(""))


QUICK = ("shapes", "shapes_nft", "sd35_medium", "models/shapes_video")
"""Run files that unit tests read twice: one per recipe, modality and kind of model."""


def some(paths):
    """Files as parameters; reading one takes a tenth of a second, so most are slow tests."""
    return [p if named(p) in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in paths]


@pytest.mark.parametrize("path", some(CONFIGS), ids=named)
def test_every_run_file_resolves_to_itself(path, tmp_path):
    run, text = loaded(path)
    assert f"class_path: pipelines.{type(run.policy).__name__}" in text
    again = tmp_path / "resolved.yaml"
    again.write_text(text)
    assert load(str(again))[1] == text


def test_a_tuple_of_components_resolves_to_itself(tmp_path):
    files = [FOLDER / "models/ltx2.yaml", FOLDER / "methods/omni_nft.yaml"]
    run, text = loaded(*files)
    assert len(run.policy.streams.audio_gradient) > 1
    again = tmp_path / "resolved.yaml"
    again.write_text(text)
    assert load(str(again))[1] == text


@pytest.mark.parametrize("path", some(p for p in CONFIGS if "shapes" in p.stem), ids=named)
def test_run_files_of_the_embedded_model_can_be_planned(path):
    rows = plan(loaded(path)[0])
    assert rows["trainable parameters"].endswith("%)")


def test_the_run_file_of_flux_can_be_planned_from_configurations_alone():
    folder = "policy.path=assets/golden/I_flux1_pipeline"
    rows = plan(load(str(FOLDER / "flux1_dev.yaml"), [folder])[0], world=8)
    assert rows["denoising steps"] == "6, of which 5 stochastic and trained [0, 1, 2, 3, 4]"
    assert rows["network evaluations per step"] == "6912 sampling + 5760 training"


def test_the_values_borrowed_from_flow_grpo_are_those_of_its_sheet():
    run, _ = loaded(FOLDER / "sd35_medium.yaml")
    sampling = run.recipe.sampling
    assert (sampling.num_steps, sampling.samples_per_prompt, sampling.eta) == (10, 24, 0.7)
    assert (run.recipe.algorithm.clip, run.recipe.algorithm.kl_coef) == (1e-4, 0.04)
    assert (run.policy.lora.rank, run.policy.lora.alpha, run.policy.guidance) == (32, 64, 4.5)
    assert (run.ema.decay, run.ema.every, run.evaluation.num_steps) == (0.9, 8, 40)


def test_the_values_borrowed_for_flux_are_those_of_its_sheet():
    run, _ = loaded(FOLDER / "flux1_dev.yaml")
    sampling, policy = run.recipe.sampling, run.policy
    assert (sampling.num_steps, sampling.samples_per_prompt, sampling.eta) == (6, 24, 0.9)
    assert (run.recipe.algorithm.clip, run.recipe.algorithm.kl_coef) == (1e-5, 0.0)
    assert "reference" not in run.recipe.algorithm.needs
    assert (policy.lora.rank, policy.lora.alpha) == (64, 128)
    assert policy.lora == LORA
    assert (policy.embedded_guidance, policy.guidance, policy.precision) == (3.5, 1.0, "bf16")
    assert (policy.height, policy.width, policy.max_sequence_length) == (512, 512, 128)
    assert (run.optimizer.learning_rate, run.optimizer.weight_decay) == (3e-4, 1e-4)
    assert (run.ema.decay, run.ema.every, run.evaluation.num_steps) == (0.9, 8, 28)


@pytest.mark.parametrize(
    ("model", "values"),
    [
        ("flux1_kontext", (6, 28, 21, 48, 0.9, 3)),
        ("qwen_image", (10, 50, 16, 32, 1.2, 4)),
        ("qwen_image_edit", (10, 50, 16, 32, 1.0, 4)),
    ],
)
def test_the_values_borrowed_for_editing_models_are_those_of_flow_grpo(model, values):
    run, _ = loaded(FOLDER / "models" / f"{model}.yaml")
    recipe, sampling, policy = run.recipe, run.recipe.sampling, run.policy
    steps = sampling.num_steps, run.evaluation.num_steps
    groups = sampling.samples_per_prompt, recipe.prompts_per_step
    assert (*steps, *groups, sampling.eta, recipe.micro_batch) == values
    assert recipe.micro_batch == sampling.micro_batch
    assert (recipe.updates_per_step, recipe.advantages.scale) == (2, "batch")
    assert (recipe.algorithm.clip, recipe.algorithm.kl_coef) == (1e-4, 0.0)
    assert (run.ema is None) == (model != "flux1_kontext")
    assert (policy.height, policy.width, policy.precision) == (512, 512, "bf16")
    assert (policy.lora.rank, policy.lora.alpha) == (64, 128)


def test_a_plan_refuses_fewer_evaluation_prompts_than_processes():
    run, _ = load(str(FOLDER / "shapes.yaml"), ["evaluation.num_prompts=6"])
    assert plan(run, world=6)
    with pytest.raises(ValueError, match=r"evaluation\.num_prompts is 6, too few for 7 processes"):
        plan(run, world=7)


def pairs_of_model_and_method():
    """Those of FLUX.1 differ from those of Stable Diffusion 3.5 in sizes and policy: only in CI."""
    for model in MODELS:
        marks = [pytest.mark.slow] if model == "flux1_dev" else []
        for method in METHODS:
            yield pytest.param(model, method, id=f"{model}-{method}", marks=marks)
    yield pytest.param("toy_shapes", "flow_grpo_all_steps", id="shapes-flow_grpo_all_steps")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "method"), pairs_of_model_and_method())
def test_every_method_has_a_usable_run_for_all_three_models(model, method):
    run, _ = loaded(*files_of(model, method))
    assert run.policy.__class__ is loaded(FOLDER / "models" / f"{model}.yaml")[0].policy.__class__
    if model == "toy_shapes":
        assert plan(run)["reward calls per step"]


@pytest.mark.slow
def test_values_of_the_papers_are_in_the_run_files_that_quote_them():
    runs = {method: loaded(*files_of("sd35_medium", method))[0].recipe for method in METHODS}
    comb, tree = runs["tempflow_grpo"].sampling, runs["branch_grpo"].sampling
    assert (comb.branching.children, comb.seeds_per_prompt, comb.samples_per_prompt) == (6, 4, 216)
    assert runs["tempflow_grpo"].step_weight == "std"
    assert (tree.samples_per_prompt, tree.eta) == (16, 0.3)
    assert (runs["tp_grpo"].sampling.eta, runs["tp_grpo"].algorithm.kl_coef) == (0.7, 1e-4)
    assert runs["stepwise_flow_grpo"].completion.max_steps == 5
    assert runs["stepwise_flow_grpo"].advantages.scale == "joint"
    assert runs["g2rpo"].credit.strides == [1, 2, 3]
    assert runs["e_grpo"].sampling.merge == 2.2
    assert runs["mixgrpo"].sampling.sde_window.every == 150


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe.credit=flowalign.credit.Branch"], r"set recipe\.sampling\.branching"),
        (
            ["recipe.credit=flowalign.credit.LeafAdvantage", "recipe.advantages.scale=given"],
            r"recipe\.sampling\.branching to flowalign\.sampling\.(branching\.)?Tree",
        ),
        (
            ["recipe.sampling.branching=flowalign.sampling.Tree"],
            r"has 8 samples .*not 12(.|\n)*Set recipe\.sampling\.samples_per_prompt to 8",
        ),
        (
            [
                "recipe.sampling.branching=flowalign.sampling.Tree",
                "recipe.sampling.branching.splits=[0,5]",
            ],
            r"splits at \[5\], which the window",
        ),
        (
            [
                "recipe.sampling.branching=flowalign.sampling.Comb",
                "recipe.sampling.branching.children=4",
                "recipe.credit=flowalign.credit.Gain",
            ],
            r"these trajectories branch",
        ),
        (
            ["recipe.credit=flowalign.credit.Contrast", "recipe.advantages.scale=given"],
            r"set recipe\.sampling\.seeds_per_prompt to 1",
        ),
        (["recipe.credit=flowalign.credit.Granular"], r"set it to given"),
        (["recipe.advantages.scale=given"], r"Outcome gives no advantages: choose from group"),
        (
            ["recipe.algorithm=flowalign.losses.StepDPO", "recipe.updates_per_step=17"],
            r"updates_per_step is 17, but a loss of pairs divides a step by prompts",
        ),
        (["recipe.sampling.seeds_per_prompt=5"], r"which seeds_per_prompt 5 does not divide"),
        (["recipe.sampling.eta=[0.5,0.6]"], r"has 2 levels for 8 steps"),
        (["recipe.sampling.merge=2.2"], r"merge"),
    ],
)
def test_needs_that_sampling_does_not_meet_are_refused_with_a_remedy(overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(str(FOLDER / "shapes.yaml"), overrides)
    assert len(str(caught.value).splitlines()) <= 5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe.completion.guidance=off"], r"samples without classifier-free guidance"),
        (["recipe.completion.weights=ema", "ema=null"], r"ema is null; set ema, or policy"),
    ],
)
def test_a_plan_refuses_completions_that_the_policy_cannot_follow(overrides, message):
    run, _ = load(str(FOLDER / "shapes.yaml"), overrides)
    with pytest.raises(ValueError, match=message):
        plan(run)
