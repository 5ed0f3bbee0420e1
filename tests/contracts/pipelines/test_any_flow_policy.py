"""`AnyFlow` satisfies the contract of policies, on the embedded Stable Diffusion 3."""

from typing import Any

import pytest
import torch

from pipelines.any_pipeline.any_flow import AnyFlow, Call
from pipelines.network.weights import Lora
from tests.fixtures.embedded import FOLDER
from tests.fixtures.families import SD3_FAMILY, TINY_SD3, Family, official_sd3
from tests.fixtures.policy_contract import PictureContract

pytestmark = pytest.mark.slow


class TestAnyFlow(PictureContract):
    """On the fixture `family`."""

    # it is refused in the pipeline's own words: "have to be divisible by"
    test_a_size_that_does_not_fit_is_refused_by_plan_and_load = None
    # loading makes steps, and the embedded network has no places for larger pictures
    test_the_name_of_encoders_depends_on_the_size_of_pictures = None


def unloaded(path: str, max_sequence_length: int = 1, **settings: Any) -> AnyFlow:
    arguments = {"guidance_scale": 1.0, "max_sequence_length": max_sequence_length}
    return AnyFlow(path, call=Call(arguments=arguments), **settings)


def new(**changes: Any) -> AnyFlow:
    lora = Lora(rank=3, alpha=7)
    defaults = {"path": FOLDER, "height": 32, "width": 32, "precision": "fp32", "lora": lora}
    policy = unloaded(**defaults | changes)
    policy.load(torch.device("cpu"))
    return policy


@pytest.fixture
def family() -> Family:
    return Family(
        cls=unloaded,  # type: ignore[arg-type]
        path=FOLDER,
        new=new,
        official=official_sd3,
        prompts=SD3_FAMILY.prompts,
        other=TINY_SD3,
        other_prompts=SD3_FAMILY.other_prompts,
    )
