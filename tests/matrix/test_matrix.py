"""A run that `check` accepts trains: a sample of methods and models that changes with the code."""

import csv
import random
from pathlib import Path

import pytest

from tests.fixtures.draw import content_hash
from tests.fixtures.matrix import METHODS, MODELS, ROOT, Matrix
from tests.fixtures.run_files import CONFIGS

pytestmark = pytest.mark.slow
SAMPLES = 4
"""Combinations of one run of the tests; `make matrix` trains all."""


def drawn() -> list[tuple[str, str]]:
    """Return other combinations for each content, each of another method and another model."""
    draw = random.Random(content_hash())
    return list(zip(draw.sample(list(MODELS), SAMPLES), draw.sample(METHODS, SAMPLES), strict=True))


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield Matrix(folder)


def test_every_model_file_has_a_tiny_pipeline():
    assert sorted(file.stem for file in (CONFIGS / "models").glob("*.yaml")) == sorted(MODELS)


def test_every_combination_has_trained_or_is_refused():
    """`python -m tests.matrix.run --methods NAME --table ...` trains the row of a new method."""
    with (ROOT / "assets/matrix.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["method", *MODELS]
    assert [row[0] for row in rows] == METHODS
    assert {state for row in rows for state in row[1:]} == {"trained", "refused"}


@pytest.mark.always
@pytest.mark.parametrize(("model", "method"), drawn())
def test_an_accepted_combination_trains(matrix, model, method):
    result = matrix.result(model, method)
    assert result.state in ("trained", "refused"), result.why
    assert len(result.why.splitlines()) <= 5


def test_a_method_that_needs_guidance_trains_without_it(matrix):
    assert matrix.result("flux1_dev", "nft").state == "trained"


RUNS = {
    "any pipeline": ("toy_shapes", "any_flow"),
    "sound": ("ltx2", "methods/omni_nft", "tasks/sound"),
    "rate of a LoRA": ("flux1_dev", "methods/adjoint_matching", "tasks/lora_rate"),
    "refl with pre-training": ("sd35_medium", "methods/refl", "tasks/refl_pretraining"),
    "hyper_align": ("sd35_medium", "methods/draft_lv", "tasks/hyper_align_sd35"),
    "visual questions": ("sd35_medium", "methods/draft_lv", "tasks/visual_questions"),
    "spectra reward": ("sd35_medium", "methods/awm", "tasks/spectra_reward"),
    "soft counting": ("sd35_medium", "methods/draft_lv", "tasks/soft_counting"),
    "region reward": ("sd35_medium", "tasks/region_reward"),
    "unified reward": ("sd35_medium", "tasks/unified_reward"),
    "context consistency": ("flux1_kontext", "tasks/context_consistency"),
    "anime reward": ("wan22_5b_i2v", "tasks/anime_reward"),
    "vader": ("wan21_1_3b", "methods/vader", "tasks/hpsv2"),
    "clip rollouts": ("wan21_1_3b", "methods/worldcompass_wan", "tasks/clip_rollouts"),
    **{name: ("sd35_medium", f"methods/{name}") for name in ("kvpo", "ipo", "align_prop")},
    "edit score": ("flux1_kontext", "tasks/editing"),
    "lsc": ("sd35_medium", "methods/lsc"),
    "modpo": ("sd35_medium", "preference/sd35_dpo", "tasks/modpo"),
    "curriculum": ("sd35_medium", "preference/sd35_dpo", "tasks/curriculum"),
    "flow dpo of wan": ("wan21_1_3b", "preference/wan_flow_dpo"),
    "ppd": ("sd15", "preference/sd15_ppd"),
    "ppd of sdxl": ("sdxl", "preference/sdxl_ppd"),
    "hyper_align of flux": (
        *("flux1_dev", "methods/draft_lv", "tasks/hpsv2", "tasks/hyper_align_flux1"),
    ),
    "euphonium": ("sd35_medium", "credit/sd35_medium/euphonium"),
    "step-wise grpo": ("sd35_medium", "credit/sd35_medium/step_grpo"),
    "latent gain": ("sd35_medium", "credit/sd35_medium/latent_gain"),
    "flow nrg": ("sd35_medium", "tasks/flow_nrg_sd35"),
    "euphonium of wan": ("wan21_1_3b", "tasks/euphonium_wan21_1_3b"),
    "latent gain of wan": ("wan21_1_3b", "tasks/latent_gain_wan21_1_3b"),
    "flow nrg of wan": ("wan21_1_3b", "tasks/flow_nrg_wan21_1_3b"),
    "mpo of wan": ("wan21_1_3b", "preference/wan_mpo"),
    "gapo of wan": ("wan21_1_3b", "preference/wan_gapo"),
    "dense dpo of wan": ("wan21_1_3b", "preference/wan_dense_dpo"),
    "flow rwr of wan": ("wan21_1_3b", "preference/wan_flow_rwr"),
    "auto beta": ("sd35_medium", "preference/sd35_dpo", "tasks/auto_beta"),
    "slic": ("sd35_medium", "preference/sd35_dpo", "tasks/slic"),
    "iterative dpo": ("sd35_medium", "methods/online_dpo", "tasks/iterative_dpo"),
    "dense reward": ("sd35_medium", "tasks/dense_reward"),
    "aesthetic target": ("sd35_medium", "methods/align_prop", "tasks/aesthetic_target"),
    "photos": ("flux1_dev", "methods/srpo", "tasks/photos"),
    "maps of words": ("words", "words_flow_grpo", "tasks/words_places"),
    "levels of edits": ("qwen_image_edit", "tasks/edit_levels"),
    "wan 2.2": ("wan22_14b", "credit/wan22_14b/flow_grpo"),
    "wan 2.1 from a first frame": ("wan21_14b_i2v", "credit/wan21_14b_i2v/flow_grpo"),
}
"""Run files of components that no other run file names, with a model for each. The file of the
model comes first, unless the first file is complete."""
LATENT = {
    "sd35_latent": "sd35_medium",
    "sd35_drm": "sd35_medium",
    "wan21_1_3b_latent": "wan21_1_3b",
}
"""Model of each latent reward that run files use."""
COMPLETE = ("any_flow", "credit/", "preference/", "words")


@pytest.fixture(scope="module")
def latent_rewards(matrix):
    """Latent rewards, trained on the first blocks of the tiny models."""
    for name, model in LATENT.items():
        matrix.train_reward(name, model)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_file_of_a_component_trains_one_step(matrix, latent_rewards, name):
    model, *parts = RUNS[name]
    parts = parts if parts[0].startswith(COMPLETE) else [f"models/{model}", *parts]
    files = [f"configs/{part}.yaml" for part in parts]
    matrix.check_files(model, files)
    assert matrix.train_files(model, files, Path("out") / name.replace(" ", "_"))["steps"] == 1
    labelled = [ROOT / file for file in files if "/methods/" not in file]  # by the table
    assert not [f.name for f in labelled if f.read_text().startswith("# [checked only]")]


TOYS = (
    *("shapes_draft", "shapes_draft tasks/shapes_hyper_align", "shapes_parrot", "shapes_adjoint"),
    *("shapes_flow_nrg", "shapes_edit_cogni", "shapes_edit_nft", "shapes_edit_tempflow"),
    *("words_draft", "shapes tasks/shapes_places"),
    *("credit/toy_shapes/b2_diffurl", "credit/toy_shapes/cogni_edit", "credit/toy_shapes/e_grpo"),
    *("credit/toy_shapes/dynamic_treerpo", "credit/toy_shapes/flow_grpo_cps"),
    *("credit/toy_shapes/g2rpo", "credit/toy_shapes/gcpo", "credit/toy_shapes/step_dpo"),
    *("credit/toy_shapes/step_grpo", "credit/toy_shapes/tree_grpo"),
    *("credit/toy_shapes/euphonium", "credit/toy_shapes/latent_gain"),
)
"""Run files of toy models that no other test trains; each content trains two."""


@pytest.mark.parametrize("toy", random.Random(content_hash()).sample(TOYS, 2))
def test_a_run_file_of_a_toy_model_trains_one_step(matrix, toy):
    files = [f"configs/{name}.yaml" for name in toy.split()]
    matrix.check_files("shapes_video", files)  # which changes no path and no size
    assert matrix.train_files("shapes_video", files, Path("out/toy"))["steps"] == 1


def test_run_files_of_toy_models_that_train_one_step_say_so():
    for toy in TOYS:
        text = (ROOT / f"configs/{toy.split()[-1]}.yaml").read_text()
        assert text.startswith(("# [step tested] ", "# [run on CPU] ")), toy


@pytest.mark.parametrize("model", ["z_image", "qwen_image21"])
def test_a_critic_is_refused_where_it_cannot_read_features(matrix, model):
    result = matrix.result(model, "critic", trains=False)
    assert result.state == "refused"
    assert "choose credit without a critic" in result.why


def test_forty_toy_steps_of_each_method_lower_no_reward_or_have_a_reason():
    """Results of tests/matrix/learn_methods.py; 0.05 is the noise of means of 384 samples."""
    with (ROOT / "assets/learn_methods.csv").open(newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert rows.keys() == {path.stem for path in (CONFIGS / "methods").glob("*.yaml")}
    for method, row in rows.items():
        if not row["reason"]:
            assert row["steps"] == "40", method
            assert float(row["after"]) > float(row["before"]) - 0.05, method
