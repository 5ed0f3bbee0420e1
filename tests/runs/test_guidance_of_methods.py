"""A method asks for guidance in one word, and each model family maps it to its own settings."""

import pytest

from flowalign.runs.config import load
from flowalign.utils.errors import ConfigError
from tests.fixtures.run_files import CONFIGS

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
